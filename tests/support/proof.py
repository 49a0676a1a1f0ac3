"""What is required, what is broken on purpose, and which test shows or notices it: the tables of docs/proof.md.

`python -m tests.support.proof` writes them, and with `--mutants` lists each mutant. `tests/project/test_proof.py` says
whether the page is as they are.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/proof.md"
F: Final = "tests/faults/test_"
NEMESIS: Final = f"{F}nemesis.py::test_no_history_contradicts_the_promises"


class Requirement(NamedTuple):
    """What a fault has to lead to, and the tests that show it."""

    fault: str
    result: str
    tests: tuple[str, ...]


REQUIREMENTS: Final = (
    Requirement(
        "The holder is stopped for 3 ttl",
        "its guarded write does not commit, its handle is `lost`, its release leaves the next tenure alone",
        (
            f"{F}paused.py::test_a_holder_that_slept_through_its_lease_cannot_commit_a_guarded_write",
            f"{F}paused.py::test_a_holder_that_sleeps_after_the_guard_keeps_everybody_out",
        ),
    ),
    Requirement(
        "Release, expiry, reaping, deletion, restart, mixed",
        "fences strictly increase",
        (
            f"{F}fences.py::test_fences_increase_through_everything",
            f"{F}fences.py::test_fences_increase_through_crashes_of_the_server",
        ),
    ),
    Requirement(
        "Packets are dropped during a hold",
        "`lost` by the trust deadline, though the renewal hangs",
        (f"{F}network.py::test_a_black_hole_ends_trust_in_time",),
    ),
    Requirement(
        "A renewal's answer is late by 0.8 ttl",
        "trust counts from the sending",
        (
            f"{F}network.py::test_a_late_answer_counts_from_the_sending",
            f"{F}network.py::test_an_answer_after_the_deadline_revives_nothing",
            f"{F}network.py::test_an_extend_answered_late_counts_from_its_sending",
        ),
    ),
    Requirement(
        "Every renewal fails for 10 ttl",
        "the holder steps down once, then one holder",
        (
            f"{F}network.py::test_a_holder_that_cannot_renew_steps_down_once",
            f"{F}refusals.py::test_renewals_refused_for_good_end_the_hold_once",
        ),
    ),
    Requirement(
        "The renewal and release of an old tenure are sent again",
        "no effect",
        (f"{F}fences.py::test_what_an_earlier_tenure_said_has_no_effect_on_the_next",),
    ),
    Requirement(
        "A wrong key, owner or fence",
        "no effect",
        (f"{F}fences.py::test_wrong_names_have_no_effect", f"{F}fences.py::test_a_renewal_says_which_tenures_live"),
    ),
    Requirement(
        "Clocks of applications are wrong, or stepped",
        "nothing changes",
        (
            f"{F}clocks.py::test_a_clock_wrong_by_an_hour_changes_nothing",
            f"{F}clocks.py::test_a_clock_that_is_stepped_changes_nothing",
            NEMESIS,
        ),
    ),
    Requirement(
        "A take inside an old transaction",
        "expiry counts from now",
        ("tests/django/test_transactions.py::test_a_lease_counts_from_now_not_from_the_transaction",),
    ),
    Requirement(
        "The caller's transaction rolls back",
        "an independent lock is held on",
        ("tests/django/test_transactions.py::test_a_rollback_does_not_release",),
    ),
    Requirement(
        "The holder is killed; the first k of 20 waiters are killed",
        "the next one holds within ttl + 1 s; within one waiter lease",
        (
            f"{F}queue.py::test_the_next_has_the_key_when_its_holder_was_killed",
            f"{F}queue.py::test_dead_waiters_are_passed_over_together",
        ),
    ),
    Requirement(
        "`acquire` is cancelled, interrupted, or times out",
        "a handle, or nothing after one ttl, and no renewer",
        (
            f"{F}interrupts.py::test_every_moment_of_a_lock_may_be_interrupted",
            f"{F}races.py::test_an_acquire_that_times_out_leaves_nothing",
            "tests/contract/test_cancellation.py::test_a_cancelled_take_leaves_nothing",
        ),
    ),
    Requirement(
        "Release against renewal",
        "never extended afterwards, nothing runs on",
        (
            f"{F}races.py::test_a_release_against_a_renewal_wins",
            f"{F}races.py::test_an_async_release_against_a_renewal_wins",
            f"{F}races.py::test_a_successor_is_not_renewed_by_its_predecessor",
        ),
    ),
    Requirement(
        "A connection is cut between COMMIT and its answer",
        "no second grant, no orphan",
        (
            f"{F}network.py::test_a_statement_cut_off_grants_once_and_leaves_no_orphan",
            f"{F}network.py::test_a_renewal_cut_off_is_renewed_again",
            f"{F}network.py::test_a_hand_over_cut_off_is_one",
        ),
    ),
    Requirement(
        "100 clients take a missing row",
        "one wins; no deadlock reaches a caller",
        (f"{F}queue.py::test_a_crowd_takes_a_missing_row",),
    ),
    Requirement(
        "Serialization failures, deadlocks, SQLITE_BUSY",
        "bounded retries, then a typed error",
        (
            f"{F}refusals.py::test_what_an_error_means",
            f"{F}refusals.py::test_a_passing_refusal_is_not_noticed",
            f"{F}refusals.py::test_a_lasting_refusal_ends_in_an_error_of_ours",
            f"{F}refusals.py::test_refusals_while_waiting",
        ),
    ),
    Requirement(
        "1,000 failed tries a second on PostgreSQL",
        "no WAL, no row locks",
        ("tests/servers/test_wire.py::test_losers_write_no_wal_and_lock_no_row",),
    ),
    Requirement(
        "1,000 leases are renewed for minutes",
        "95 % heap-only, the table stays flat, no long transaction",
        (f"{F}renewals.py::test_renewals_are_heap_only_and_the_table_stays_as_it_is",),
    ),
    Requirement(
        "PgBouncer in transaction mode",
        "the suite passes",
        ("tests/servers/test_pooler.py::test_the_short_form_of_make_pooler",),
    ),
    Requirement(
        "The database restarts during holds, waits and renewals",
        "all reconnect, no second grant, waits go on",
        (
            f"{F}queue.py::test_waits_go_on_when_the_database_restarts",
            f"{F}crash.py::test_what_was_granted_survives",
            f"{F}crash.py::test_crashes_amid_a_queue_that_moves_on",
            NEMESIS,
        ),
    ),
    Requirement(
        "A replica that lacks the row is promoted",
        "the old holder is `lost`, later fences are higher",
        (f"{F}failover.py::test_what_a_replica_lacks_is_waited_for",),
    ),
    Requirement(
        "The listener's connection is killed during hand-overs",
        "each arrives within the fallback interval",
        (f"{F}queue.py::test_a_listener_that_is_killed_again_and_again", f"{F}queue.py::test_no_wake_up_is_lost"),
    ),
    Requirement(
        "Pauses, kills and cuts over many keys",
        "no two tenures overlap, no update is lost",
        (NEMESIS,),
    ),
    Requirement(
        "Hostile keys, tokens and users",
        "a clear error, nothing changed",
        (
            "tests/statements/test_texts.py::test_a_key_is_a_lock_or_refused",
            "tests/contract/test_lease.py::test_what_is_no_token_is_refused",
            "tests/django/test_inspector.py::test_a_hostile_user",
            "tests/django/test_inspector.py::test_look_ups_by_hand",
            "tests/contract/test_secrets.py::test_no_token_is_told",
        ),
    ),
    Requirement(
        "Guarded read-modify-write under every isolation level",
        "the right number, or errors",
        ("tests/contract/test_guard.py::test_no_update_is_lost", NEMESIS),
    ),
    Requirement(
        "A stranger's lock; a server that never answers",
        "a try within 0.3 s, timeouts to 50 ms, others are renewed",
        (
            f"{F}bounds.py::test_a_strangers_lock",
            f"{F}bounds.py::test_a_strangers_lock_on_what_is_held",
            f"{F}bounds.py::test_a_server_that_does_not_answer",
            f"{F}bounds.py::test_a_stuck_take_keeps_no_renewal_and_no_release",
        ),
    ),
    Requirement(
        "Signals that raise at any moment",
        "each key is free within ttl + 1 s",
        (
            f"{F}interrupts.py::test_every_moment_of_a_lock_may_be_interrupted",
            f"{F}interrupts.py::test_every_moment_of_every_kind_may_be_interrupted",
            f"{F}interrupts.py::test_signals_at_random_moments_leave_nothing",
        ),
    ),
    Requirement(
        "Other search_path, role, time zone, router",
        "one lock",
        (
            "tests/django/test_connections.py::test_one_lock_whatever_the_callers_session",
            "tests/django/test_connections.py::test_one_lock_whatever_the_callers_session_on_mysql",
            "tests/django/test_connections.py::test_the_routers_are_asked_once",
        ),
    ),
    Requirement(
        "Read-only for three seconds",
        "waiters wait on, holders go by their clock",
        (f"{F}bounds.py::test_a_server_that_takes_no_writes_for_a_moment", NEMESIS),
    ),
    Requirement(
        "Galera with two writers; standbys promoted",
        "what the page on clusters says",
        (
            "tests/servers/test_galera.py::test_one_at_a_time_across_nodes",
            "tests/servers/test_galera.py::test_a_tenure_is_seen_where_it_has_yet_to_arrive",
            f"{F}failover.py::test_what_a_replica_lacks_is_waited_for",
            f"{F}clusters.py::test_a_synchronous_standby_is_promoted",
            f"{F}clusters.py::test_nodes_of_galera_fail",
            f"{F}clusters.py::test_a_member_of_a_mysql_group_is_cut_off",
            f"{F}clusters.py::test_patroni_dies_and_its_postgresql_lives_on",
            f"{F}nemesis.py::test_a_standby_is_promoted_again_and_again",
        ),
    ),
    Requirement(
        "Round trips of 20 and 80 ms",
        "timeouts are kept, nothing is left after a second, the queue keeps its rate",
        (
            f"{F}distance.py::test_a_time_out_is_kept_and_leaves_nothing",
            f"{F}distance.py::test_a_contended_key_is_served",
            f"{F}distance.py::test_a_cancellation_leaves_nothing",
            NEMESIS,
        ),
    ),
    Requirement(
        "Any text in any parameter",
        "a lock, or a refusal before any I/O",
        (
            "tests/statements/test_texts.py::test_every_statement_takes_every_text",
            "tests/statements/test_texts.py::test_every_text_is_stored_and_found_as_it_is",
            "tests/statements/test_texts.py::test_any_text_as_a_key",
        ),
    ),
    Requirement(
        "Idle connections are swallowed by the network",
        "a try answers within its bound, a second is enough",
        (
            f"{F}bounds.py::test_connections_that_the_network_has_forgotten",
            f"{F}bounds.py::test_a_renewal_over_a_connection_that_the_network_has_forgotten",
            f"{F}network.py::test_a_listener_that_the_network_has_forgotten",
        ),
    ),
    Requirement(
        "A lagging standby is promoted, a backup restored, a database wiped",
        "no second holder before the quarantine ends",
        (
            f"{F}failover.py::test_what_a_replica_lacks_is_waited_for",
            f"{F}failover.py::test_a_dump_that_was_restored_closes_the_keys",
            f"{F}failover.py::test_a_lease_by_another_clock_is_waited_out",
            f"{F}failover.py::test_a_hundred_promotions",
            f"{F}quorum.py::test_a_standby_that_is_promoted_counts_when_nobody_relies_on_its_primary_any_more",
        ),
    ),
    Requirement(
        "Readers, writers, permits, several keys, leaders under all faults",
        "readers and writers apart, permits at most N, one leader",
        (NEMESIS, "tests/core/test_sharing_worlds.py::test_what_is_broken_is_noticed"),
    ),
    Requirement(
        "A minority of a majority's databases fails",
        "all goes on; two minorities never both",
        (
            f"{F}quorum.py::test_a_minority_that_fails_delays_nobody_after_its_first_failure",
            f"{F}quorum.py::test_two_of_three_that_do_not_answer",
            NEMESIS,
        ),
    ),
)


def requirements() -> Iterator[str]:
    """The table."""
    yield "| | fault | what has to follow | tests |"
    yield "|---|---|---|---|"
    for number, each in enumerate(REQUIREMENTS, 1):
        tests = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in each.tests)
        yield f"| {number} | {each.fault} | {each.result} | {tests} |"


# -- mutants

WORLDS: Final = ("tests.core.test_small_worlds", "tests.core.test_sharing_worlds", "tests.core.test_pool_worlds")
"""Modules with a list MUTANTS, and a test `test_what_is_broken_is_noticed` over it."""
MAJORITY: Final = "tests.core.test_quorum_worlds"
"""Its mutants are tests of their own."""
ABOUT: Final = {
    "test_sharing_worlds": "family",
    **dict.fromkeys(("trusts_from_the_answer", "trusts_too_long", "covered_by_nothing", "takes_lightly"), "trust"),
    **dict.fromkeys(("opens_at_once", "any_server_will_do", "creates_without_asking"), "quarantine"),
    **dict.fromkeys(("grants_without_asking", "trusts_the_old_clock"), "quarantine"),
    **dict.fromkeys(("grants_what_is_held", "hands_over_what_is_over", "nothing_is_undone", "credulous"), "protocol"),
    **dict.fromkeys(("given_back_twice", "frees_what_it_handed_over"), "protocol"),
    "test_small_worlds": "queue",
    "test_pool_worlds": "connections",
}
"""What a mutant is about, by its name; else by that of its module."""
ORDER: Final = ("protocol", "trust", "queue", "quarantine", "family", "majority", "connections")
STATEMENTS: Final = (
    ("trust", "take", "fence = greatest(* -> nothing", "A take keeps the fence of the tenure before."),
    ("trust", "renew", "expires_at > clock_timestamp() -> TRUE", "A lease that has ended is renewed."),
    ("protocol", "renew", "locks.owner = due.owner -> TRUE", "The watchdog renews a successor's lease."),
    ("protocol", "renew", "locks.fence = due.fence -> TRUE", "It renews a later tenure of the same owner."),
    ("protocol", "release", "fence = :fence -> TRUE", "A release does not name the fence."),
    (
        "protocol",
        "free",
        "fence = :fence -> TRUE",
        "An administrator frees another tenure than the one that was shown.",
    ),
    ("queue", "grant", "expires_at > clock_timestamp() -> TRUE", "A dead waiter is granted the key."),
    ("quarantine", "grant", "epoch.opens_at <= clock_timestamp() -> TRUE", "A grant does not wait for the quarantine."),
)
"""Conditions of PostgreSQL's statements, for the table; `make mutants` takes all of them away, on each database."""


def words(name: str) -> str:
    """A name of a function, as words."""
    return name.removeprefix("test_").replace("_", " ").capitalize()


def mutants() -> Iterator[tuple[str, str, str, str]]:
    """What each is about, its name, what it does otherwise, and the test that notices it."""
    for module in WORLDS:
        test = f"{module.replace('.', '/')}.py::test_what_is_broken_is_noticed"
        for each in dict.fromkeys(entry[0] for entry in importlib.import_module(module).MUTANTS):
            said = (inspect.getdoc(each) or "").split("\n\n")[0].replace("\n", " ")
            about = ABOUT.get(each.__name__) or ABOUT[module.rpartition(".")[2]]
            yield about, each.__name__, said or f"{words(each.__name__)}.", test
    for about, statement, change, said in STATEMENTS:
        yield about, f"{statement}: {change.rstrip('*')}", said, "tests/statements/mutants.py::test_mutant"
    for name, function in vars(importlib.import_module(MAJORITY)).items():
        if name.startswith("test_") and re.search("_found|raises", inspect.getsource(function)):
            yield "majority", name, f"{words(name)}.", f"{MAJORITY.replace('.', '/')}.py::{name}"


def mutations() -> Iterator[str]:
    """The table: a row for each subject, with the first of its mutants and the tests that notice them all."""
    yield "| about | mutants | for example | noticed by |"
    yield "|---|---|---|---|"
    for about in ORDER:
        found = [each for each in mutants() if each[0] == about]
        tests = dict.fromkeys(f"`{test.removeprefix('tests/').partition('::')[0]}`" for *_, test in found)
        yield f"| {about} | {len(found)} | {' '.join(said for *_, said, _ in found[:1])} | {'<br>'.join(tests)} |"


# -- the page


def between(name: str, lines: Sequence[str], page: str) -> str:
    """The page with those lines in the part of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return "\n".join([f"{head}{begin}", *lines, f"{end}{tail}"])


def whole(page: str) -> str:
    """The page with both tables."""
    return between("mutants", list(mutations()), between("requirements", list(requirements()), page))


def defined(test: str) -> bool:
    """Whether there is such a test."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    return name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def main() -> None:
    if sys.argv[1:] == ["--mutants"]:
        sys.stdout.writelines("\t".join(each) + "\n" for each in mutants())
    else:
        _ = PAGE.write_text(whole(PAGE.read_text()))


if __name__ == "__main__":
    main()
