"""`dblock` and `manage.py dblock`, as somebody types them: what they say, what they change, how they exit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from django.db import OperationalError
from sqlalchemy import make_url

from dblock import LockLost
from dblock.cli import main
from dblock.core import runtime
from dblock.operating.commands.console import span, table
from sqlalchemy_dblock import db_lock, db_rwlock, db_semaphore
from sqlalchemy_dblock.store import described
from tests.commands.conftest import EACH, Shell, end_of, rest_of, until_said
from tests.conftest import SERVERS, observer, own_engine, timed
from tests.contract.test_queue import stranger
from tests.support.hung import hung
from tests.support.lab import cycle, there, until, without
from tests.support.pages import block
from tests.support.subjects import Subject

# -- ls, show


@pytest.mark.parametrize("shell", [EACH[0]], indirect=True, ids=str)
def test_djangos_own_options_stand_behind_the_command_too(shell: Shell) -> None:
    """As everywhere in Django."""
    behind = ("--settings", "tests.settings", "--pythonpath", ".", "--traceback", "--no-color", "-v", "0")
    assert shell("ls", *behind).stdout == "no lock is held\n"
    assert shell("ls", "-v", "7").returncode == 2


def test_ls_lists_who_holds_what(shell: Shell) -> None:
    """As a table for people, as JSON for programs; a pattern, also what is free."""
    cycle(shell.lock("stock:41"))
    assert shell("ls").stdout == "no lock is held\n"
    with shell.lock("stock:42", label="picking ü 货"), shell.lock("report"):
        listed = shell("ls")
        assert (listed.returncode, listed.stderr) == (0, "")
        header, report, stock = listed.stdout.splitlines()
        assert header.split() == ["KEY", "STATE", "HELD", "FOR", "LEFT", "WAITERS", "HOLDER", "LABEL"]
        assert report.startswith("report    held")
        assert stock.startswith("stock:42  held")
        assert f"pid {os.getpid()}" in stock
        assert stock.endswith("picking ü 货")
        found = json.loads(shell("ls", "stock:*", "--all", "--json").stdout)
        assert [(row["key"], row["state"]) for row in found] == [("stock:41", "free"), ("stock:42", "held")]
        assert found[1]["label"] == "picking ü 货"
        assert found[1]["pid"] == os.getpid()
        assert 0 <= found[1]["held_for"] < 60
        assert 0 < found[1]["remaining"] <= 30
        assert (found[1]["kind"], found[1]["slot"]) == ("lock", None)
        assert "owner" not in found[1]
        limited = shell("ls", "--limit", "1")
        assert len(limited.stdout.splitlines()) == 2
        assert "there are more" in limited.stderr
        assert shell("ls", "stock:[5-9]*").stdout == "no lock that fits 'stock:[5-9]*' is held\n"


@pytest.mark.parametrize("shell", [each for each in EACH if each.face == "sqlalchemy"], indirect=True, ids=str)
def test_show_tells_what_happened(shell: Shell) -> None:
    """Where a history is kept; the latest first, in words and as JSON."""
    engine = own_engine(shell.database, execution_options={"dblock_history": 100})
    cycle(db_lock(engine, "k", label="tea\x1b[2J"))
    assert until(lambda: len(json.loads(shell("show", "k", "--json").stdout)["events"]) == 2, 10)
    left, took = json.loads(shell("show", "k", "--json").stdout)["events"]
    assert (took["kind"], took["detail"], left["kind"]) == ("acquired", "at_once", "released")
    assert (took["fence"], took["pid"], took["ago"] >= left["ago"]) == (left["fence"], os.getpid(), True)
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(took["at"])).total_seconds()) < 60
    assert took["at"] <= left["at"]
    few = shell("show", "k", "--events", "1").stdout
    assert "acquired" not in few
    assert "(the last 1; --events N shows more)" in few
    shown = shell("show", "k").stdout
    assert "shows more" not in shown
    lines = [line for line in shown.splitlines() if f"pid {os.getpid()}" in line]
    assert re.match(r"\d\d:\d\d:\d\d +\d", lines[-1])
    assert re.search(r"released +held 0\.\d s +released .* tea\\x1b\[2J$", lines[-2])
    assert re.search(r"acquired +waited 0\.\d s +at once ", lines[-1])


@pytest.mark.parametrize("shell", [EACH[2]], indirect=True, ids=str)
def test_show_without_a_history(shell: Shell) -> None:
    """Whose table is missing, or may not be read: that is said, beside all else."""
    with without(shell.database, "lock_events"), shell.lock("k"):
        shown = shell("show", "k")
    assert shown.returncode == 0
    assert "held" in shown.stdout
    assert "no table `lock_events`: `dblock schema` prints the SQL" in shown.stderr


def test_show_tells_all_about_a_key(shell: Shell) -> None:
    """Who holds it, and the queue in order; a key without a row is an error."""
    assert "'nothing' has no row" in shell.fails(1, "show", "nothing")
    with shell.lock("k", label="mine") as lock:
        waiting = threading.Thread(target=lambda: shell.lock("k", label="next", timeout=30).acquire())
        waiting.start()
        assert until(lambda: shell.run("SELECT 1 FROM lock_waiters"), 10)
        told = shell("show", "k").stdout
        for line in ("key:          k", "state:        held", f"fence:        {lock.fence}", "waiters:      1"):
            assert line in told.splitlines()
        assert "next" in told
        found = json.loads(shell("show", "k", "--json").stdout)
        assert (found["key"], found["fence"], found["label"], found["waiters"]) == ("k", lock.fence, "mine", 1)
        [waiter] = found["queue"]
        assert waiter["label"] == "next"
        assert waiter["waiting_for"] >= 0
        assert "owner" not in told
        [(ticket,)] = shell.run("SELECT ticket FROM lock_waiters")
        stranger(Subject("sqlalchemy", "sync", shell.database), ticket + 1, 60)  # whose place nobody keeps
        assert "(and 1 more; --waiters N shows more)" in shell("show", "k", "--waiters", "1").stdout
        found = json.loads(shell("show", "k", "--json", "--waiters", "1").stdout)
        assert (found["waiters"], [each["label"] for each in found["queue"]]) == (2, ["next"])
        shell.run("DELETE FROM lock_waiters WHERE owner = 's'")
    waiting.join()
    assert "state:        held" in shell("show", "k").stdout


def test_a_lease_that_has_ended_blocks_nobody(one: Shell) -> None:
    """And that is said."""
    one.lock("k", ttl=0.1, renew=False).acquire()
    assert until(lambda: ": anybody may take the key" in one("show", "k").stdout, 10)


@pytest.mark.parametrize("shell", [each for each in EACH if each.database in SERVERS], indirect=True, ids=str)
def test_a_key_that_a_transaction_pins(shell: Shell) -> None:
    """Its lease has ended, and nobody can take it: each command says so, names the session and what ends it."""
    with hung(shell.database, "k") as (_, session):
        perhaps = "perhaps " if shell.database == "mariadb" else ""
        end = f"SELECT pg_terminate_backend({session})" if shell.database == "postgresql" else f"KILL {session}"
        listed = shell("ls").stdout
        assert re.search(r"^k +pinned ", listed, re.MULTILINE)
        assert f"'k' is pinned: {perhaps}session {session} of " in listed
        assert f"; to end it: {end}\n" in listed
        told = shell("show", "k").stdout
        assert "anybody may take the key" not in told
        assert "state:        pinned: nobody can take the key" in told
        assert f"pinned by:    {perhaps}session {session} of " in told
        assert f"to end it:    {end}\n" in told
        found = json.loads(shell("show", "k", "--json").stdout)
        assert (found["state"], found["pinned"]["transactions"][0]["end"]) == ("pinned", end)
        assert " pinned " in shell("top", "--count", "1").stdout
        doctor = shell("doctor")
        assert doctor.returncode > 0
        assert "WARNING  pinned: nobody holds 'k', and nobody can take it" in doctor.stdout
        assert "The keys are free" not in doctor.stdout
        done = shell("release", "k", "--yes")
        assert "was freed" in done.stdout
        assert f"nobody can take it before that transaction ends: {perhaps}session {session}" in done.stderr
        assert re.search(r"^k +pinned ", shell("ls").stdout, re.MULTILINE), "it is free, and of no use to anybody"
        assert f"session {session}" in shell("release", "k", "--yes").stderr
        shell.run(end)
    assert shell("ls").stdout == "no lock is held\n"
    assert "state:        free" in shell("show", "k").stdout


# -- release, reap


def test_release_frees_the_tenure_that_was_shown(shell: Shell) -> None:
    """Nobody is asked where nobody can answer; its holder is told who did it, and why."""
    with pytest.raises(LockLost, match=r"@.*: it hangs\)"), shell.lock("k", ttl=60) as lock:
        assert "say --yes" in shell.fails(2, "release", "k")
        assert "not held under fence 7" in shell.fails(1, "release", "k", "--yes", "--fence", "7")
        assert lock.verify()
        done = shell("release", "k", "--yes", "--reason", "it hangs", "--fence", str(lock.fence))
        assert (done.returncode, done.stdout) == (0, f"'k' (fence {lock.fence}) was freed\n")
    assert shell.fails(1, "release", "k", "--yes") == "dblock: 'k' is not held\n"


def test_release_can_ask_instead(shell: Shell) -> None:
    """The lock is held on, and its holder hears of it."""
    asked: list[str] = []
    with shell.lock("k", on_revoke=lambda _, words: asked.append(words)) as lock:
        done = shell("release", "k", "--ask", "--yes", "--reason", "deploy", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["done"] is True
        assert until(lambda: asked, 5)
        assert asked[0].endswith(": deploy")
        assert lock.verify()
        assert "asked back:" in shell("show", "k").stdout
        assert "hears of it in 10 s" in shell("release", "k", "--ask", "--yes").stdout


@pytest.mark.parametrize(
    ("shell", "answer", "freed"),
    [(EACH[0], "y\n", True), (EACH[2], "\n", False), (EACH[2], "\x04", False)],
    indirect=["shell"],
    ids=str,
)
def test_at_a_terminal_it_asks(shell: Shell, answer: str, freed: bool) -> None:
    """And shows whom it is about."""
    lock = shell.lock("k", ttl=60, label="nightly")
    lock.acquire()
    pid, master = shell.at_a_terminal("release", "k")
    seen = until_said(master, b"[y/N]")
    assert b'"nightly"' in seen
    assert b"Its holder is not stopped" in seen
    os.write(master, answer.encode())
    assert (b"was freed" if freed else b"nothing was done") in rest_of(master)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if freed else 2)
    with pytest.raises(LockLost) if freed else contextlib.nullcontext():
        lock.release()


def test_reap_deletes_what_nobody_uses(shell: Shell) -> None:
    """As the function does."""
    cycle(shell.lock("old"))
    assert shell("reap").stdout == "0 rows of locks and 0 of lock_waiters were deleted\n"
    with shell.lock("held"):
        assert until(lambda: json.loads(shell("reap", "--retention", "0.05", "--json").stdout)["locks"] == 1, 10)
        assert shell.run("SELECT lock_key FROM locks") == [("held",)]


# -- when something is wrong


def test_a_database_that_is_not_there(
    one: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence and an exit status, no traceback."""
    if one.face == "django":
        assert "there is no database 'nowhere'" in one.fails(1, "show", "k", "--using", "nowhere")
        monkeypatch.setattr("dblock.checks._is_ours", Mock(side_effect=OperationalError))
        assert "reachable" in one("doctor").stdout, "and what Django's checks say without it"
        return
    timed(monkeypatch, retry_budget=0.5)  # nobody listens there
    url = ["--url", "postgresql+psycopg://nobody@127.0.0.1:1/x"]
    for verb, status in ((["reap"], 69), (["run", "-w", "0.5", "k", "--", "true"], 69), (["doctor"], 2)):
        assert main([*url, *verb]) == status
        told = capsys.readouterr()
        assert "127.0.0.1" in told.out + told.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ls", "name the database"),
        ("--url oracles://user@host/name ls", "no URL as SQLAlchemy wants it"),
        ("--url nonsense ls", "no URL as SQLAlchemy wants it"),
        ("--url sqlite+aiosqlite:///nowhere.sqlite3 run k -- true", "aiosqlite is a driver for asyncio"),
        ("--url sqlite:///nowhere.sqlite3 ls", r"^\S+: error: there is no file nowhere.sqlite3\n$"),
    ],
)
def test_databases_that_cannot_be(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is named, or one that makes no sense; no file is made."""
    monkeypatch.delenv("DBLOCK_URL", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert re.search(said, capsys.readouterr().err)
    assert not Path("nowhere.sqlite3").exists()


def test_mistakes_are_told(one: Shell) -> None:
    """What is missing, or makes no sense."""
    for wrong in (
        ("run", "k"),
        ("run", "--", "echo", "hi"),
        ("run", "--ttl", "0", "k", "--", "true"),
        ("ls", "--limit", "0"),
        ("reap", "--retention", "-1"),
        ("reap", "--retention", "soon"),
        ("run", "-n", "-w", "1", "k", "true"),
        *(("run", key, "--", "true") for key in ("", "x" * 256)),
        *(("show", key) for key in ("", "x" * 256)),
        *(("release", "--yes", key) for key in ("", "x" * 256)),
    ):
        told = one.fails(2, *wrong)
        assert "Traceback" not in told
        assert " value" not in told, "argparse's own words for a function of ours"


def test_a_url_without_a_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As platforms give it to an application: it is that of the extra, not one that SQLAlchemy would rather have."""
    timed(monkeypatch, retry_budget=0.5)  # nobody listens there
    for kind, driver in (
        ("postgres", "postgresql+psycopg"),
        ("postgresql", "postgresql+psycopg"),
        ("mysql", "mysql+pymysql"),
    ):
        assert main(["--url", f"{kind}://nobody@127.0.0.1:1/x", "doctor"]) == 2
        assert f"{driver}://nobody@127.0.0.1:1/x" in capsys.readouterr().out
    assert main(["--url", "postgres://nobody@127.0.0.1:1/x", "schema"]) == 0
    assert "fillfactor" in capsys.readouterr().out


def test_the_url_may_come_from_the_environment_and_names_other_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DBLOCK_URL; --prefix."""
    monkeypatch.setenv("DBLOCK_URL", f"sqlite:///{tmp_path}/x.sqlite3")
    assert main(["--prefix", "my_", "run", "--create-tables", "k", "--", "true"]) == 0
    assert main(["--prefix", "my_", "ls", "-a"]) == 0
    assert "k " in capsys.readouterr().out
    assert main(["ls"]) == 69
    assert main(["schema"]) == 0
    assert "CREATE TABLE locks" in capsys.readouterr().out
    assert main(["schema", "mysql", "--states"]) == 0
    assert "lock_states" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("ls", "--json"), ("top", "--interval", "0.1")], ids=" ".join)
def test_a_reader_that_goes_away_is_no_error(one: Shell, command: tuple[str, ...]) -> None:
    """`dblock ls | head -1`; `top` prints into a pipe until nobody reads on."""
    process = one.start(*command)
    assert process.stdout is not None
    seen = ""
    while command[0] == "top" and seen.count("dblock top") < 2:
        seen += process.stdout.readline()
    process.stdout.close()
    assert end_of(process, 20) == (141, "", "")


def test_shells_can_complete_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The script knows the verbs."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "doctor" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_what_the_runbook_shows(one: Shell) -> None:
    """Is what the commands print: the same lines, names and columns."""

    def shape(printed: str) -> list[str]:
        lines = re.sub(r"^(.+?: +).+$", r"\1", printed, flags=re.MULTILINE).splitlines()
        return [line if line[-1:] in {" ", ""} else " ".join(re.findall(r"[A-Z]{2,}|#", line)) for line in lines]

    holder, waiter = one.lock("stock:42", ttl=3, label="nightly"), one.lock("stock:42", timeout=20, label="checkout")
    with ThreadPoolExecutor(1) as other:
        with holder:
            waiting = other.submit(waiter.acquire)
            assert until(lambda: '"waiters": 1' in one("ls", "--json").stdout, 10)
            assert until(lambda: "\nrenewed: " in one("show", "stock:42").stdout, 10)
            shown, listed = one("show", "stock:42").stdout, one("ls").stdout
        assert waiting.result(20) is True
        other.submit(waiter.release).result(20)
    assert shape(listed) == shape(block("docs/runbook.md", "runbook-ls"))
    told = shape(block("docs/runbook.md", "runbook-show"))
    assert shape(shown)[: len(told)] == told


# -- how things are said


def test_lengths_of_time() -> None:
    """As people say them."""
    said = [span(seconds) for seconds in (-1, 0.44, 9.96, 59, 60, 3599, 3600, 172799, 172800)]
    assert said == ["0.0 s", "0.4 s", "10.0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "47 h 59 min", "2 d"]


def test_tables_line_up_whatever_is_in_them() -> None:
    """Wide characters take two columns, combining ones and joiners none."""
    drawn = table(("A", "B"), [("货", "1"), ("e\u0301", "2"), ("xyz", "3"), ("ه\u200cا", "4")])
    assert drawn.splitlines() == ["A    B", "货   1", "e\u0301    2", "xyz  3", "ه\u200cا   4"]


def test_keys_that_the_terminal_cannot_show(one: Shell) -> None:
    """They are escaped there, and JSON remains JSON."""
    with one.lock("ключ 😀"):
        status, out, err = end_of(one.start("ls", env_more={"PYTHONIOENCODING": "ascii"}), 30)
        assert (status, err) == (0, "")
        assert r"\u043a\u043b\u044e\u0447 \U0001f600" in out
        _, out, _ = end_of(one.start("ls", "--json", env_more={"PYTHONIOENCODING": "latin-1"}), 30)
        assert [each["key"] for each in json.loads(out)] == ["ключ 😀"]


def test_a_question_is_not_part_of_the_answer(one: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a pipe that waits for JSON."""
    monkeypatch.setattr("dblock.operating.commands.console.can_ask", lambda: True)
    with one.lock("k"):
        assert "Free 'k'? [y/N]" in one.fails(2, "release", "--json", "k"), "standard input is empty: not agreed"


def test_no_password_is_shown() -> None:
    """Wherever in the URL it is."""
    for text in (
        "postgresql+psycopg://u:S3CRET@h:1/d",
        "postgresql+psycopg://u@h:1/d?password=S3CRET&sslpassword=S3CRET",
        "mysql+pymysql://u:a@S3CRET@h:1/d?passwd=S3CRET",
    ):
        shown = described(make_url(text))
        assert shown == text.partition(":")[0] + "://u@h:1/d"
    assert described(make_url("postgresql+psycopg:///d?host=/run/pg")) == "postgresql+psycopg:///d?host=%2Frun%2Fpg"


def test_a_token_that_nobody_has_used(one: Shell) -> None:
    """Its key is shown by who left it, who need not exist any more."""
    lock = one.lock("k", ttl=60)
    assert lock.acquire()
    _ = lock.detach()
    shown = one("show", "k").stdout
    assert re.search(rf"^detached by: .* pid {os.getpid()}", shown, re.MULTILINE)
    assert re.search(r"^state: +detached: nobody holds it until its token is used$", shown, re.MULTILINE)
    assert re.search(r"^since: +detached \S+ ms|^since: +detached \S+ s ago", shown, re.MULTILINE)
    assert re.search(r"^k +detached +detached ", one("ls").stdout, re.MULTILINE)
    [told] = json.loads(one("ls", "--json").stdout)
    assert (told["state"], 0 <= told["detached_for"] < 20) == ("detached", True)
    assert one("release", "--yes", "k").returncode == 0


def test_a_key_that_min_hold_keeps_closed(one: Shell) -> None:
    """Nobody holds it: no time of holding grows, and it is said who gave it back."""
    cycle(one.lock("k", min_hold=20))
    _, listed = one("ls").stdout.splitlines()
    assert re.match(r"k +closed +- +(19|20) s", listed)
    [told] = json.loads(one("ls", "--json").stdout)
    assert (told["state"], told["held_for"], told["remaining"] > 10) == ("closed", None, True)
    shown = one("show", "k").stdout
    assert "state:        closed: it was released, and its min_hold is not over" in shown
    assert re.search(rf"^last held by: .* pid {os.getpid()}", shown, re.MULTILINE)
    assert one("release", "--yes", "k").returncode == 0
    assert "state:        free\n" in one("show", "k").stdout


def test_the_next_to_enter_is_no_holder(one: Shell) -> None:
    """Of a semaphore without a free permit: it waits as others do, and `show` says who it is."""
    with one.lock("k", label="mine"):
        one.run("UPDATE locks SET kind = 2")
        assert re.search(r"^k +waiting +- +- +1 +- +-$", one("ls").stdout, re.MULTILINE)
        [row] = json.loads(one("ls", "--json").stdout)
        assert (row["state"], row["held_for"]) == ("waiting", None)
        [snapshot] = one("top", "--json", "--count", "1").stdout.splitlines()
        assert [json.loads(snapshot)[name] for name in ("held", "waiting")] == [0, 1]
        shown = one("show", "k").stdout
        assert re.search(r"^next: .* pid", shown, re.MULTILINE)
        assert re.search(r"^waiting for: +\d", shown, re.MULTILINE)
        assert "holder:" not in shown
        one.run("UPDATE locks SET kind = 0")


def test_the_first_lease_after_a_hand_over(one: Shell) -> None:
    """It is that of the place in the queue, which is short: `show` says so."""
    with one.lock("k"):
        one.run("UPDATE locks SET ttl = 600")
        left = there(re.search(r"^left: +(.*)$", one("show", "k").stdout, re.MULTILINE))
        assert re.fullmatch(r"[23]\d s of 30 s: it was handed over; its first renewal makes that 10 min 0 s", left[1])


def test_shares_are_shown_and_freed_one_by_one(one: Shell) -> None:
    """Readers and permits are listed by what they are, under their key, and each can be freed by that name."""
    engine = observer(one.database)
    readers = [db_rwlock(engine, "k", label=f"reader {number}").read() for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        both = threading.Barrier(2)  # else one thread may take both, which is one reader
        assert all(pool.map(lambda lock: both.wait(9) >= 0 and lock.acquire(), readers))
        semaphore = db_semaphore(engine, "s", 3)
        assert semaphore.acquire(n=2)
        slots = sorted(permit.slot for permit in semaphore.held)
        listed = one("ls").stdout
        assert re.findall(r"^(k \(reader [0-9a-f]+\))  \s*held .* reader \d$", listed, re.MULTILINE)
        assert re.findall(r"^s \(permit (\d)\)\s+held", listed, re.MULTILINE) == [str(slot) for slot in slots]
        kinds = {(row["key"][0], row["kind"]) for row in json.loads(one("ls", "--json").stdout)}
        assert kinds == {("k", "read_write"), ("s", "semaphore")}
        states = {row["key"]: row["state"] for row in json.loads(one("ls", "--all", "--json").stdout)}
        assert (states["k"], states["s"]) == ("shared", "shared")
        for part in (one("ls", "--all", "k"), one("ls", "--all", "--limit", "1")):
            assert re.search(r"^k +shared", part.stdout, re.MULTILINE)
        refused = one.fails(1, "release", "--yes", "k")
        assert re.search(r"its readers hold it.* such as 'k \(reader [0-9a-f]+\)'$", refused, re.MULTILINE)
        shown = one("show", "k").stdout
        assert "kind:         a read-write lock" in shown
        assert "state:        shared: readers hold it" in shown
        assert "last held by" not in shown, "each holder has a row of its own"
        names = re.findall(r"^(k \(reader [0-9a-f]+\))", shown, re.MULTILINE)
        assert len(names) == 2
        told = json.loads(one("show", "s", "--json").stdout)
        assert told["state"] == "shared"
        assert [share["label"] for share in told["shares"]] == ["", ""]
        assert [share["slot"] for share in told["shares"]] == slots
        assert json.loads(one("show", f"s (permit {slots[0]})", "--json").stdout)["kind"] == "semaphore"
        assert "a share of a semaphore" in one("show", f"s (permit {slots[0]})").stdout
        assert one("release", "--yes", f"s (permit {slots[1]})").returncode == 0
        assert one("release", "--yes", names[0]).returncode == 0
        assert len(re.findall(r"^k \(reader", one("ls").stdout, re.MULTILINE)) == 1
        assert semaphore.available() == 2
        assert one("release", "--yes", "k (reader 0)").returncode == 1
        assert one("release", "--yes", names[1]).returncode == 0
        assert "state:        free\n" in one("show", "k").stdout
    one.run("DELETE FROM locks")
    for hold in list(runtime.current.watchdog._holds):
        runtime.current.watchdog.discard(hold)
