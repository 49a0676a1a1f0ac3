"""`release`, `quarantine` and `reap`: what changes something."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
from argparse import Namespace
from typing import Final

from dblock.core.protocol import reaping
from dblock.core.protocol.drive import drive
from dblock.core.text import printable
from dblock.core.validation import TEXT_LENGTH, valid_retention
from dblock.core.values import SHARE, LockInfo
from dblock.operating import administration
from dblock.operating.administration import Surveyed
from dblock.operating.commands.console import (
    agreed,
    complain,
    lock_json,
    say,
    say_json,
    span,
    whose,
)
from dblock.operating.commands.context import Context

DONE, NOT_HELD, NOT_AGREED = 0, 1, 2


def release(context: Context, options: Namespace) -> int:
    """End the tenure of a key, or ask its holder to; 1 if nobody holds it, 2 if that was not agreed to."""
    key = context.row_key(options.key)
    info, shown = context.inspect(key), repr(printable(key))
    pinned = None if options.ask else context.pinned(key)
    if pinned:
        pins = "; ".join(pinned.told(span))
        complain(f"{shown} is pinned, and nobody can take it before that transaction ends: {pins}")
    if info is None or info.owner is None or options.fence not in {None, info.fence}:
        complain(f"{shown} is not held" + (f" under fence {options.fence}" if options.fence else ""))
        share = next((each for each in context.survey(key + SHARE) if each.info.state == "held"), None)
        if share is not None:
            example = shlex.quote(printable(share.info.key))
            complain(f"its readers hold it, or permits are in use: free each by its own name, such as {example}")
        return NOT_HELD
    question = f"Ask it to release {shown}?" if options.ask else f"{_warning(info)}\nFree {shown}?"
    if not (options.yes or agreed(f"{shown} {whose(info)} (fence {info.fence}).\n{question}")):
        return NOT_AGREED
    end = administration.revoke if options.ask else administration.force_release
    done = drive(end(context.store, key, info.fence, _words(options.reason)))
    if options.json:
        say_json({**lock_json(Surveyed(info, 0, pinned)), "done": done})
    elif done:
        say(f"{shown} (fence {info.fence}) " + (_ASKED % span(info.ttl / 3) if options.ask else "was freed"))
    else:
        complain(f"{shown} (fence {info.fence}) was over before; its present holder was left alone")
    return DONE if done else NOT_HELD


def reap(context: Context, options: Namespace) -> int:
    """Delete the rows of keys that nobody has used for long; 0."""
    retention = context.retention if options.retention is None else valid_retention(options.retention)
    reaped = drive(reaping.reap(context.store.database, retention))
    if options.json:
        say_json(reaped._asdict())
    else:
        say(f"{reaped.locks} rows of locks and {reaped.lock_waiters} of lock_waiters were deleted")
    return DONE


def quarantine(context: Context, options: Namespace) -> int:
    """Say whether keys are closed after a failover, or open or close them.

    1 if they are closed, unless that was asked for; 2 if a change was not agreed to, or is not possible.
    """
    found = context.quarantine(begins=options.end or options.begin)
    database = context.store.database
    if options.begin and database.dialect.epoch is None:
        complain(f"nothing was done: {context.where} has no quarantine. {_STOP}")
        return NOT_AGREED
    if found is not None and (options.begin or (options.end and found.opens_in > 0)):
        question = _BEGIN if options.begin else f"{context.where} was {found}.\n{_END}"
        if not (options.yes or agreed(question)):
            return NOT_AGREED
        until = database.now() + database.timing.retry_budget
        _ = drive(administration.set_quarantine(database, until, closed=options.begin))
        found = context.quarantine()
    if options.json:
        say_json(None if found is None else found._asdict())
    elif found is None and database.dialect.epoch is None:
        say(f"{context.where} has no replicas: there is no quarantine")
    elif found is None:
        say(f"{context.where}: {_UNKNOWN}")
    else:
        open_ = f"keys are open, and are given away by this server since {span(found.since)} ago"
        say(f"{context.where}: {found if found.opens_in > 0 else open_}")
    return NOT_HELD if found is not None and found.opens_in > 0 and not options.begin else DONE


_ASKED: Final = (
    "was asked back: its holder hears of it in %s at the latest, if its lock is renewed, and may or may not heed it"
)
_STOP: Final = (
    "SQLite has no replicas. If a copy or a dump of the file is restored, a lock that was taken since may get a second "
    "holder: first stop all processes that use the file, until the longest ttl and grace in use are over"
)
_UNKNOWN: Final = "nobody has taken a lock since the server has started; the first who does will know more"
_END: Final = (
    "A key may then have two holders, if it was granted before and this server does not know. Go on only if nothing "
    "was lost (the old primary is dead and had sent everything; or this server was shut down in order), or no client "
    "of before is left. Open the keys?"
)
_BEGIN: Final = (
    "Nobody gets a key before the leases that may be out there have ended. Those who hold one go on. Close the keys?"
)


def _warning(info: LockInfo) -> str:
    if info.waits:
        return "It loses its turn to the next waiter, and queues again. Those that hold the key now keep it."
    return (
        f"Its holder is not stopped: it learns of this at its next renewal, in {span(info.ttl / 3)} at the latest, or, "
        "if its lock is not renewed, when it next asks. "
        "Until then only guard() stops what it writes; a fence stops it once a later holder has written."
    )


def _words(reason: str | None) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name goes with the number, in a container for example
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}: {reason or 'no reason given'}"[:TEXT_LENGTH]
