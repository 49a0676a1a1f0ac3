"""`dblock run`: a command under a lock, as flock(1) runs one under a file's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from dblock.cli import main
from sqlalchemy_dblock import create_tables
from tests import settings
from tests.commands.conftest import EACH, Shell, end_of, rest_of, until_said
from tests.conftest import each_of, observer, own_engine, url
from tests.support.lab import LONG, ROOT, there, times, until


def free(shell: Shell, key: str = "k") -> bool:
    """Whether nobody holds the key."""
    return shell.run("SELECT owner FROM locks WHERE lock_key = :k", k=key) in ([(None,)], [])


one = each_of([EACH[0], EACH[2]] if LONG else [EACH[2]])
"""One face, since each test starts processes; both in `make faults`."""
DEAF = ("sh", "-c", 'trap "" TERM; echo $$; while :; do sleep 1; done')
"""A command that says what process it is, and does not end by TERM."""


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it says."""
    return there(process.stdout).readline().strip()


def begun(one: Shell, *arguments: str, **options: Any) -> tuple[subprocess.Popen[str], str]:
    """`run`, and the first line that its command says."""
    process = one.start("run", *arguments, **options)
    return process, line_of(process)


def test_its_status_is_the_commands(one: Shell) -> None:
    """Which runs under the lock, knows about it, and has our standard streams."""
    script = 'read line; echo "$line $DBLOCK_KEY $DBLOCK_FENCE"; echo complaint >&2; exit 7'
    process = one.start("run", "--label", "nightly", "k", "--", "sh", "-c", script)
    ended = end_of(process, 30, "hello\n")
    [(fence, label)] = one.run("SELECT fence, label FROM locks WHERE lock_key = 'k'")
    assert (ended, label) == ((7, f"hello k {fence}\n", "complaint\n"), "nightly")
    assert free(one)
    assert one("run", "k", "--", "sh", "-c", "kill -USR2 $$").returncode == 128 + signal.SIGUSR2
    unnamed = one.run("SELECT label FROM locks WHERE lock_key = 'k'")
    assert unnamed == [("sh",)], "the command's name, and no argument, which may be a secret"
    assert one("run", "k", "--", "no such command").returncode == 127
    assert one("run", "k", "--", "/etc/passwd").returncode == 126
    assert free(one)


def test_busy(one: Shell, tmp_path: Path) -> None:
    """At once, or after a while; with another status if one was given. The command does not run."""
    with one.lock("k", label="theirs"):
        for run, options, status in (
            (one, ["--nb"], 75),
            (one.apart, ["--timeout", "0.3"], 75),  # in this thread it would be a deadlock
            (one, ["-n", "-E", "9"], 9),
        ):
            done = run("run", *options, "k", "--", "touch", f"{tmp_path}/ran")
            assert done.returncode == status
            assert '"theirs"' in done.stderr
    assert not (tmp_path / "ran").exists()


def test_it_waits_as_long_as_it_takes(one: Shell) -> None:
    """Without a timeout, and takes over when it is its turn."""
    with one.lock("k"):
        process = one.start("run", "k", "--", "echo", "ran")
        assert until(lambda: one.run("SELECT 1 FROM lock_waiters"), 20)
    assert end_of(process, 20)[:2] == (0, "ran\n")


def test_signals_are_passed_on(one: Shell) -> None:
    """The command answers to each of them, and ends when it wants to."""
    script = """
for name in HUP INT TERM; do trap "echo got $name" $name; done
trap "echo got USR1; exit 5" USR1
echo ready
while :; do sleep 30 >/dev/null 2>&1 & wait; done
"""
    process, said = begun(one, "k", "--", "sh", "-c", script)
    assert said == "ready"
    for name in ("HUP", "INT", "TERM", "USR1"):
        process.send_signal(signal.Signals[f"SIG{name}"])
        assert line_of(process) == f"got {name}"
    assert end_of(process, 10)[0] == 5
    assert free(one)


def test_a_signal_ends_the_wait(one: Shell) -> None:
    """And leaves nobody in the queue."""
    with one.lock("k"):
        for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            process = one.start("run", "k", "--", "true")
            assert until(lambda: one.run("SELECT 1 FROM lock_waiters"), 20)
            process.send_signal(number)
            assert end_of(process, 10) == (status, "", "")
            assert one.run("SELECT 1 FROM lock_waiters") == []


def test_the_command_is_ended_when_the_lock_is_lost(one: Shell) -> None:
    """By TERM, and what it has started with it, by KILL if need be."""
    stubborn = '(trap "" TERM; while :; do sleep 1; done) >/dev/null 2>&1'
    script = f'trap "echo bye; exit 3" TERM; {stubborn} & echo $!; wait; sleep 1'
    process, started = begun(one, "--ttl", "3", "k", "--", "sh", "-c", script)
    assert one("release", "--yes", "--reason", "enough", "k").returncode == 0
    status, out, err = end_of(process, 10)
    assert (status, out) == (76, "bye\n")
    assert "enough" in err
    assert until(lambda: not _lives(started), 10)


def test_nobody_has_the_key_before_the_command_is_dead(one: Shell) -> None:
    """Where renewals do not get through: the row is closed for as long as ending it may take."""
    process, pid = begun(one, "--ttl", "1", "--kill-after", "1", "k", "--", *DEAF)
    process.send_signal(signal.SIGSTOP)
    heir = one.lock("k", timeout=20)
    began = time.monotonic()
    assert heir.acquire()
    assert time.monotonic() - began > 1.5
    heir.release()
    process.send_signal(signal.SIGCONT)
    assert (end_of(process, 15)[0], _lives(pid)) == (76, False)


def test_the_command_does_not_outlive_who_keeps_its_lock(one: Shell) -> None:
    """SIGKILL, or out of memory: it is ended with what it has started, by TERM and then by KILL."""
    script = 'trap "echo asked" TERM; sleep 60 & echo $$ $!; wait; sleep 61 & echo $!; wait'
    process, said = begun(one, "--kill-after", "2", "k", "--", "sh", "-c", script)
    shell, first = said.split()
    process.kill()
    assert line_of(process) == "asked"
    second = line_of(process)
    assert until(lambda: not any(map(_lives, (shell, first, second))), 10)
    process.communicate()


def _state(pid: str) -> str:
    """That of a process: `T` if it is stopped, `Z` if it has ended and nobody has asked how; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end while that is read
        return ""


def _lives(pid: str) -> bool:
    return _state(pid) not in {"", "Z"}


def test_what_is_ignored_stays_so(one: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    """As nohup(1) has it; and a pipe that nobody reads ends the command, which Python itself does not want."""
    script = "kill -HUP $$; kill -HUP $PPID; sleep 0.2; echo goes on"
    process = one.start("run", "k", "--", "sh", "-c", script, through=["nohup"])
    assert end_of(process, 40)[:2] == (0, "goes on\n")
    ended = one("run", "k", "--", "sh", "-c", "kill -PIPE $$; echo goes on")
    assert (ended.returncode, capfd.readouterr().out) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "how", ["pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])", "signal(signal.SIGCHLD, signal.SIG_IGN)"]
)
def test_it_hears_of_the_end_whatever_becomes_of_sigchld(one: Shell, how: str) -> None:
    """A parent may have blocked or ignored it, which exec(2) passes on."""
    apart = [sys.executable, "-c", f"import os, signal, sys; signal.{how}; os.execvp(sys.argv[1], sys.argv[1:])"]
    process = one.start("run", "k", "--", "sh", "-c", "exit 7", through=apart)
    assert end_of(process, 40) == (7, "", "")
    assert free(one)


def test_the_command_can_show_what_it_runs_under(one: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    """A sequencer for each key, which is no secret; and nothing with which one could hold the lock."""
    script = f"""
import os
from sqlalchemy import create_engine
from sqlalchemy_dblock import check_sequencer
engine = create_engine({url(one.database)!r})
for text in os.environ["DBLOCK_SEQUENCER"].splitlines():
    shown = check_sequencer(engine, text)
    print(shown.key, shown.fence <= int(os.environ["DBLOCK_FENCE"]), "DBLOCK_TOKEN" in os.environ)
"""
    done = one("run", "a", "b", "--", sys.executable, "-W", "ignore", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert capfd.readouterr() == ("a True False\nb True False\n", "")
    assert free(one)


def test_min_hold_keeps_the_key(one: Shell) -> None:
    """For a job that must not run twice within a minute, by whatever clock each machine has."""
    assert one("run", "--min-hold", "60", "k", "--", "true").returncode == 0
    assert one("run", "--nb", "--min-hold", "60", "k", "--", "true").returncode == 75


def test_a_command_with_a_group_of_its_own(one: Shell) -> None:
    """As timeout(1) makes itself one: it is sent the signals, and ended with its lock, or with who keeps that."""
    command = ["timeout", "60", "sh", "-c", "echo $$; exec sleep 50"]
    process, first = begun(one, "k", "--", *command)
    process.send_signal(signal.SIGTERM)
    assert (end_of(process, 10)[0], _lives(first)) == (143, False)
    process, second = begun(one, "--ttl", "2", "--kill-after", "1", "k", "--", *command)
    assert one("release", "--yes", "k").returncode == 0
    assert (end_of(process, 15)[0], _lives(second)) == (76, False)
    process, third = begun(one, "--kill-after", "1", "k", "--", "timeout", "60", *DEAF)
    process.kill()
    assert until(lambda: not _lives(third), 10)
    process.communicate()


as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start processes of two users: needs setpriv(1)",
)
_MAY = "dac_override,+setuid"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps=-all,+{_MAY}"]
NOBODY += [f"--ambient-caps=+{_MAY}"]  # reads the tree and becomes another user, as sudo does; without CAP_KILL
OTHER = "setpriv --reuid=54321"


@as_root
def test_a_command_of_another_user_cannot_be_ended(one: Shell) -> None:
    """`run` waits for its end, and says that the lock was lost; the next holder does not wait for that."""
    script = f"exec {OTHER} sh -c 'trap \"\" TERM; echo $$; sed 1q'"
    process, pid = begun(one, "--kill-after", "0.5", "--ttl", "2", "k", "--", "sh", "-c", script, through=NOBODY)
    assert one("release", "--yes", "k").returncode == 0
    with one.lock("k", timeout=10):
        time.sleep(1.0)  # KILL is refused as well
        assert _lives(pid)
    status, out, err = end_of(process, 20, "hello\n")
    assert (status, out) == (76, "hello\n")
    assert "lost" in err


def test_its_watcher_is_killed(one: Shell) -> None:
    """Nobody else would end the command when the lock is lost: it is ended at once, with all that it has started."""
    process, said = begun(one, "k", "--", "sh", "-c", "sleep 60 & echo $PPID $$ $!; wait")
    watcher, *others = said.split()
    os.kill(int(watcher), signal.SIGKILL)
    assert end_of(process, 10)[0] == 128 + signal.SIGKILL
    assert until(lambda: not any(map(_lives, others)), 5)
    assert free(one)


@as_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
def test_as_process_1_it_reaps(one: Shell) -> None:
    """In a container, what has lost its parent becomes its child, and no zombie."""
    orphans = "for n in 1 2 3; do (setsid sleep 0.1 &); done; sleep 1"
    script = f"{orphans}; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '; echo $PPID"
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces are to be had, as in a chroot")
    process = one.start("run", "k", "--", "sh", "-c", script, through=alone)
    status, out, err = end_of(process, 20)
    assert status == 0, err
    zombies, watcher = out.split()
    assert (zombies, int(watcher) > 1) == ("0", True)
    assert free(one)


def test_a_command_does_not_go_on_while_its_keeper_is_stopped(one: Shell) -> None:
    """Ctrl-Z where `run` was brought to the foreground later: both stop, and both go on."""
    process, command = begun(one, "k", "--", "sh", "-c", "echo $$; read line; echo $line; exec sleep 60")
    assert process.stdin is not None
    process.send_signal(signal.SIGTSTP)
    assert until(lambda: _state(command) == _state(str(process.pid)) == "T", 10)
    process.stdin.write("goes on\n")
    process.stdin.flush()
    process.send_signal(signal.SIGCONT)
    assert line_of(process) == "goes on"
    process.send_signal(signal.SIGTERM)
    assert end_of(process, 10)[0] == 143
    assert free(one)


def test_what_was_opened_for_the_command(one: Shell, tmp_path: Path) -> None:
    """`3>file` and `<(...)` reach it; nothing of ours does."""
    with (tmp_path / "log").open("w") as log:
        number = log.fileno()
        script = f"import os; os.write({number}, b'written'); print(*os.listdir('/proc/self/fd'))"
        process = one.start("run", "k", "--", sys.executable, "-c", script, pass_fds=[number])
        out, _ = process.communicate(timeout=20)
    assert (tmp_path / "log").read_text() == "written"
    assert set(map(int, out.split())) - {0, 1, 2, number, 3} == set(), "3 is the directory"


def test_the_command_is_taken_to_the_letter(one: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    """Behind the first `--` another one is the command's own, and so are options of ours."""
    done = one("run", "k", "--", "printf", "<%s>", "a", "--", "--nb", "--", "b")
    assert (done.returncode, capfd.readouterr().out) == (0, "<a><--><--nb><--><b>")
    assert one("run", "--nb", "k", "printf", "<%s>", "a").returncode == 0
    assert capfd.readouterr().out == "<a>"
    for wrong in (["k", "--"], ["-E", "256", "k", "--", "true"], ["--kill-after", "0.001", "k", "x"]):
        assert one("run", *wrong).returncode == 2


def test_at_a_terminal_the_keys_reach_the_command_once(one: Shell, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group in the foreground: it is not sent once more; and the command may read."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time\nseen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('said', input(), flush=True)\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end: time.sleep(0.05)\n"
        "print('interrupts', len(seen), flush=True)\n"
    )
    pid, master = one.at_a_terminal("run", "k", "--", sys.executable, str(program))
    os.write(master, b"hello\n")
    seen = until_said(master, b"said hello")
    os.write(master, b"\x03")
    seen += until_said(master, b"interrupts")
    _, status = os.waitpid(pid, 0)
    seen += rest_of(master)
    assert b"interrupts 1" in seen
    assert os.waitstatus_to_exitcode(status) == 0
    assert free(one)


def test_at_a_terminal_the_command_alone_is_ended(one: Shell) -> None:
    """When `run` is killed: its group there is not its own."""
    script = "trap '' HUP; echo $$ is the shell; sleep 60 & wait; sleep 61; true"
    pid, master = one.at_a_terminal("run", "k", "--", "sh", "-c", script)
    shell = until_said(master, b" is the shell").decode().split()[-4]
    assert _lives(shell)
    os.kill(pid, signal.SIGKILL)
    _ = os.waitpid(pid, 0)
    assert until(lambda: not _lives(shell), 10)
    os.close(master)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"] if LONG else ["postgresql"])
def test_migrations_take_turns_on_a_new_database(request: pytest.FixtureRequest, tmp_path: Path, database: str) -> None:
    """Pods start at once; the lock's own table is not there yet. Each ends well, one after the other."""
    options = {**settings.DATABASES[database], "NAME": make_url(_new_database(request, database)).database}
    (tmp_path / "pod_settings.py").write_text(
        f"from tests.settings import *\nDATABASES = {{'default': {options!r}}}\n"
        "SILENCED_SYSTEM_CHECKS = ['dblock.W001', 'dblock.W004']\n"
    )
    log, number = tmp_path / "log", times(2, 5)
    migrate = f"{sys.executable} -m django migrate -v 0 && printf 'in ' >>{log} && sleep 0.05 && printf 'out ' >>{log}"
    command = ["-m", "django", "dblock", "run", "--create-tables", "migrate", "--", "sh", "-c", migrate]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "DJANGO_SETTINGS_MODULE": "pod_settings"}
    pods = [subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environment) for _ in range(number)]
    assert [pod.wait(55) for pod in pods] == [0] * number
    assert log.read_text() == "in out " * number


@pytest.mark.parametrize("missing", ["TABLE lock_waiters", "TABLE lock_epoch", "INDEX locks_pin ON locks"])
def test_tables_that_another_pod_is_making(request: pytest.FixtureRequest, tmp_path: Path, missing: str) -> None:
    """MariaDB shows them one by one, and their indexes after them: the lock is not taken before all are there."""
    address = _new_database(request, "mariadb")
    engine = own_engine(address)
    create_tables(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP {missing}")
    assert main(["--url", address, "run", "--create-tables", "k", "--", "touch", f"{tmp_path}/ran"]) == 0
    assert (tmp_path / "ran").exists()
    with engine.connect() as connection, pytest.raises(DBAPIError, match="[Ee]xists|Duplicate"):
        connection.exec_driver_sql(f"CREATE {missing} (lock_key{'' if 'INDEX' in missing else ' int'})")


def _new_database(request: pytest.FixtureRequest, database: str) -> str:
    """The address of an empty one."""
    request.getfixturevalue(database)
    name = f"pods_{os.getpid()}_{time.monotonic_ns()}"
    with observer(database).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return str(make_url(url(database)).set(database=name).render_as_string(hide_password=False))


def test_it_reads_or_writes(one: Shell, tmp_path: Path) -> None:
    """--shared runs beside others of its kind, --write alone."""
    reading = one.start("run", "--shared", "k", "--", "sh", "-c", f"touch {tmp_path}/reads; read _; exit 3")
    assert until((tmp_path / "reads").exists, 30)
    assert one("run", "-n", "--shared", "k", "--", "true").returncode == 0
    assert one("run", "-n", "--write", "k", "--", "true").returncode == 75
    assert "'k' is the key of a read-write lock" in one.fails(2, "run", "-n", "k", "--", "true")
    assert end_of(reading, 30, "\n")[0] == 3
    assert one("run", "-n", "--write", "k", "--", "true").returncode == 0


def test_it_holds_a_permit(one: Shell, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of so many."""
    script = f"echo $DBLOCK_SLOT; touch {tmp_path}/$0; read _"
    holders = [one.start("run", "--permits", "2", "k", "--", "sh", "-c", script, f"n{number}") for number in range(2)]
    assert until(lambda: all((tmp_path / f"n{number}").exists() for number in range(2)), 30)
    assert one("run", "-n", "--permits", "2", "k", "--", "true").returncode == 75
    assert one("run", "-n", "--permits", "3", "k", "--", "true").returncode == 0
    assert sorted(end_of(holder, 30, "\n")[:2] for holder in holders) == [(0, "0\n"), (0, "1\n")]
    assert one("run", "--permits", "1", "a", "b", "--", "sh", "-c", 'echo "$DBLOCK_SLOT"').returncode == 0
    assert capfd.readouterr().out == "0\n0\n", "a line for each of several keys"
    inner = one.argv("run", "inner", "--", "sh", "-c", "echo ${DBLOCK_SLOT-none}")
    assert one("run", "--permits", "1", "k", "--", *inner).returncode == 0
    assert capfd.readouterr().out == "none\n", "that of an outer run is not ours"
    assert one("run", "-n", "--permits", "1", "k", "--", "true").returncode == 0


def test_options_go_before_the_keys(one: Shell) -> None:
    """The error for those behind several keys says so; one for an option that does not exist names that."""
    for option in ("--shared", "--ttl=5"):
        told = one.fails(2, "run", "a", "b", option, "--", "true")
        assert "options go before the keys: run [options] KEY [KEY ...] -- CMD" in told
    assert "--nosuch" in one("run", "a", "b", "--nosuch", "--", "true").stderr


def test_it_holds_several_keys(one: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    """All or none; the environment names them line by line, and one fence above theirs."""
    script = 'echo "$DBLOCK_KEY" "$DBLOCK_FENCE"; echo "$DBLOCK_SEQUENCER" | wc -l'
    assert one("run", "b", "a", "--", "sh", "-c", script).returncode == 0
    fences = dict(one.run("SELECT lock_key, fence FROM locks"))
    assert capfd.readouterr().out.split() == ["b", "a", str(max(fences.values())), "2"]
    with one.lock("a", label="theirs"):
        assert "'a' is held by" in one.fails(75, "run", "-n", "b", "a", "--", "true")
    assert free(one, "b")
