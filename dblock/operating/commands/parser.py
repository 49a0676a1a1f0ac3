"""The command line, the same for both faces."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dblock.operating.commands.checkup import doctor
from dblock.operating.commands.context import Context
from dblock.operating.commands.release import quarantine, reap, release
from dblock.operating.commands.running import BUSY, run
from dblock.operating.commands.show import ls, show
from dblock.operating.commands.top import top

Verb = Callable[[Context, Namespace], int]

_STATUS = f"""\
exit status: that of the command, or 128 + n if signal n ended it; {BUSY} if the lock was not free in time
(--conflict-exit-code); 76 if it was lost meanwhile, and the command ended because of that; 69 if the database failed;
126 or 127 if the command cannot be run, or found. A command that runs as another user (`run KEY -- sudo CMD`) cannot be
ended and is sent no signals, unless `run` is root: run dblock itself as that user (`sudo dblock run KEY -- CMD`). The
command has DBLOCK_KEY, DBLOCK_FENCE and DBLOCK_SEQUENCER in its environment, and DBLOCK_SLOT with --permits; a line for
each of several keys (one fence above them all)."""


def _number(kind: Callable[[str], float], least: int, most: float, what: str) -> Callable[[str], float]:
    """What reads such a number."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (number := kind(text)) <= most:
                return number
        raise ArgumentTypeError(f"{text!r} is no {what}")

    return read


_seconds = _number(float, 0, 1e9, "number of seconds, 0 at least")
whole_number = _number(int, 1, float("inf"), "whole number, 1 at least")
_status = _number(int, 0, 255, "exit status, 0 to 255")


def add_verbs(commands: _SubParsersAction[Any]) -> None:
    """All subcommands; `verb` of the parsed options is the function."""
    listing = _add(commands, "ls", ls, "list who holds what")
    listing.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="keys that fit, such as 'stock:*'")
    listing.add_argument("-a", "--all", action="store_true", help="also keys that nobody holds")
    listing.add_argument("--limit", type=whole_number, default=1000, metavar="N", help="1000 keys by default")

    showing = _add(commands, "show", show, "show who holds a key, and who waits for it")
    showing.add_argument("key", metavar="KEY")
    showing.add_argument("--waiters", type=whole_number, default=50, metavar="N", help="of its queue; 50 by default")
    showing.add_argument("--events", type=whole_number, default=20, metavar="N", help="of its history; 20 by default")

    releasing = _add(commands, "release", release, "free a key by force, or ask for it back")
    releasing.add_argument("key", metavar="KEY")
    releasing.add_argument("--fence", type=whole_number, metavar="N", help="only if that is the tenure's number")
    releasing.add_argument("--reason", metavar="TEXT", help="what its holder is told, beside who you are")
    releasing.add_argument("--ask", action="store_true", help="only ask its holder to release it")
    releasing.add_argument("-y", "--yes", action="store_true", help="do not ask whether to go on")

    reaping = _add(commands, "reap", reap, "delete the rows of keys that nobody uses any more")
    reaping.add_argument("--retention", type=_seconds, metavar="SECONDS", help="that have not been used for so long")

    closing = _add(commands, "quarantine", quarantine, "say whether keys are closed after a failover (1: they are)")
    either = closing.add_mutually_exclusive_group()
    either.add_argument("--end", action="store_true", help="open them now: nobody of before the failover holds a key")
    either.add_argument("--begin", action="store_true", help="close them: the server may lack tenures, and cannot tell")
    closing.add_argument("-y", "--yes", action="store_true", help="do not ask whether to go on")

    _add_run(commands)

    watching = _add(commands, "top", top, "watch who holds what, live; --json: a line each time")
    watching.add_argument("-n", "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="1 by default")
    watching.add_argument("-c", "--count", type=whole_number, metavar="N", help="so many times, then end")

    _ = _add(
        commands, "doctor", doctor, "find what is wrong, and say how to mend it (0: nothing, 1: warnings, 2: errors)"
    )


def _add_run(commands: _SubParsersAction[Any]) -> None:
    usage = "%(prog)s [options] KEY [KEY ...] -- CMD [ARG ...]"
    running = _add(commands, "run", run, "run a command under a lock", json=False, epilog=_STATUS, usage=usage)
    running.add_argument("key", metavar="KEY", help="or several keys before the --: all are taken, or none")
    running.add_argument("argv", nargs="+", metavar="CMD", help="the command, after --")
    kind = running.add_mutually_exclusive_group()
    kind.add_argument("--shared", action="store_true", help="read: as a reader of a read-write lock")
    kind.add_argument("--write", action="store_true", help="as the writer of a read-write lock")
    kind.add_argument("--permits", type=whole_number, metavar="N", help="hold one of N permits of a semaphore")
    wait = running.add_mutually_exclusive_group()
    wait.add_argument("-w", "--timeout", type=_seconds, metavar="SECONDS", help="wait for so long; for ever by default")
    wait.add_argument("-n", "--nb", action="store_true", help="do not wait")
    running.add_argument("--ttl", type=_seconds, metavar="SECONDS", help="life of the lease, which is renewed")
    running.add_argument("--label", metavar="TEXT", help="for all who inspect the lock; by default the command's name")
    running.add_argument("--min-hold", type=_seconds, metavar="SECONDS", help="keep the key for so long at least")
    running.add_argument(
        "--kill-after",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="when the lock is lost KILL comes so long after TERM, and nobody else gets the key before; 5 by default",
    )
    running.add_argument(
        "-E", "--conflict-exit-code", type=_status, default=BUSY, metavar="N", help=f"{BUSY} by default"
    )
    running.add_argument(
        "--create-tables", action="store_true", help="make the lock's tables first, if they are missing"
    )
    vars(running)["parse_known_args"] = partial(_with_command, running, running.parse_known_args)


def _with_command(
    parser: ArgumentParser, parse: Callable[..., Any], arguments: Sequence[str], namespace: Namespace | None = None
) -> Any:
    """The command is what stands behind the first `--`, to the letter: argparse would take the next one out of it."""
    head, dashes, command = list(arguments), "--", list[str]()
    if head[:1] == [dashes] and dashes not in head[1:]:
        parser.error("name a key before the --: run [options] KEY [KEY ...] -- CMD")
    if dashes in head[1:]:
        at = head.index(dashes, 1)
        head, command = head[:at], head[at + 1 :]
    known, rest = parse([*head, "."] if command else head, namespace)
    if command and rest and not rest[0].startswith("-"):
        parser.error("options go before the keys: run [options] KEY [KEY ...] -- CMD")
    known.keys = [known.key]
    if command:
        known.keys += known.argv[:-1]
        known.argv = command
    return known, rest


def _add(
    commands: _SubParsersAction[Any], name: str, verb: Verb, text: str, *, json: bool = True, **options: Any
) -> ArgumentParser:
    parser: ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", **options
    )
    if json:
        parser.add_argument("--json", action="store_true", help="as JSON, times in seconds")
    parser.set_defaults(verb=verb)
    return parser
