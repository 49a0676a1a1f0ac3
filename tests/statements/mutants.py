"""Every condition of every statement makes a difference to some case. Run by `make mutants`, not by `make test`.

Each mutant (see `mutations`) is a test: it passes if some case of its statement fails on the database with the
mutant in the statement's place. One that fails is a survivor: a condition that no case needs. Either a case is
missing (`keys`, `waiters`, `families`), or the condition changes nothing that can be seen: then it stands in
`EQUIVALENT`, with the reason.

    make mutants                             all of them
    make mutants ARGS="-k 'mysql and grant'"  some of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import pytest

from dblock.core.statements import DIALECTS
from tests.conftest import DATABASES
from tests.statements.families import cases_of
from tests.statements.laboratory import Laboratory, named, statements
from tests.statements.mutations import Mutant, effective, mutants

pytestmark = pytest.mark.direct


class Excuse(NamedTuple):
    """Why a mutant changes nothing; `on`, `statement` and `change` are patterns as file names have them."""

    on: str
    statement: str
    change: str
    reason: str
    sure: bool = True
    """Whether no case ever notices. Else it depends on what the optimizer chooses at the moment."""


_READING: Final = (
    *("alive", "awaited", "chain", "count_*", "dead", "first_waiter", "list_*", "listed", "next_keys", "queue_status"),
    "stale",
)

EQUIVALENT: Final = (
    Excuse("*", "*", "epoch.id = 1 -> TRUE*", "the table has one row; it is so that an index is read"),
    Excuse(
        *("*", "[lc]*", "held.owner IS NOT NULL -> TRUE*"),
        "what follows, `held.owner <> waiter.owner`, is not true of NULL either",
    ),
    Excuse(
        *("postgresql", "*", "MATERIALIZED -> nothing"),
        "PostgreSQL never merges a query with FOR UPDATE into the one around it",
    ),
    Excuse(
        *("postgresql", "end_expired", "lock_key = ANY (ARRAY[[]due.name]) -> TRUE"),
        "the CASE says so as well, for a scan that comes to the locks of other keys",
    ),
    Excuse(
        *("postgresql", "end_expired", "lock_key = ANY (ARRAY(SELECT * -> TRUE"),
        "the condition on `due.name` says so as well, where it is asked before the CASE",
        sure=False,
    ),
    Excuse(
        *("postgresql", "*", 'COLLATE "C" -> nothing'),
        "a database's default collation is deterministic, and the hash is then of the bytes alone",
    ),
    *(
        Excuse(
            *(database, name, "ORDER BY * -> nothing"),
            "the index by which they are found has them in order (the other order is noticed)",
        )
        for database, names in (
            ("sqlite", ("[fg]*", "list_keys", "[sd]*", "listed")),
            ("m*", ("first_waiter", "listed")),
        )
        for name in names
    ),
    *(
        Excuse(
            *("m*", name, "ORDER BY * -> nothing"),
            "InnoDB keeps a table in the order of its primary key (the other order is noticed)",
        )
        for name in ("[sd]*", "list_keys")
    ),
    *(
        Excuse(
            *(database, name, "ORDER BY * -> nothing"),
            "the index that leads to them has them in order (the other order is noticed), where it is taken",
            sure=False,
        )
        for database, names in (("*", ("list_waiters", "next_keys")), ("postgresql", ("list_keys", "[sd]*", "listed")))
        for name in names
    ),
    *(
        Excuse("[ms]*", name, "1 -> TRUE", "TRUE is 1 there (PostgreSQL refuses to compare a number with it)")
        for name in ("[ht]*", "grant")
    ),
    Excuse(
        *("[ms]*", "take_slot", "1 -> FALSE"),
        "the row of a slot is of the kind 2, and no step but the one for all others is taken",
    ),
    Excuse(
        *("mysql", "*", "locks.lock_key = mine.name -> TRUE"),
        "the WHERE names the key as well",
    ),
    Excuse(
        *("mysql", "[!g]*", "lock_key = :key -> TRUE (2)"),
        "the row is the one that was locked before, by the same name",
    ),
    *(
        Excuse(
            *("mysql", name, "FORCE -> IGNORE (2)"),
            "the entry of `locks_pin` was locked before, by the reading that does not wait",
        )
        for name in ("take", "hand_over_local", "reap", "grant", "take_slot", "end_expired")
    ),
    *(
        Excuse(
            *("mariadb", name, "FORCE -> IGNORE"),
            "the optimizer takes `locks_pin`, which leads to the same rows, or scans if there are few",
            sure=False,
        )
        for name in ("reap", "end_expired")
    ),
    *(
        Excuse(
            *(database, "take_slot", f"FORCE -> IGNORE ({number})"),
            "the door is found by another index as well, and neither a pin nor this keeps the other from reading it",
        )
        for database, number in (("mysql", 3), ("mariadb", 2))
    ),
    Excuse(
        *("m*", "read", "FORCE -> IGNORE*"),
        "the door is found by another index as well, and the take locks both; of waiters only the plan changes",
        sure=False,
    ),
    Excuse(*("m*", "alone", "FORCE -> IGNORE (2)"), "it reads shares: only the plan changes"),
    Excuse(*("*", "alone", "LIMIT 1 -> nothing"), "whether there is one does not depend on how many there are"),
    *(
        Excuse(database, "take_slot", f"LIMIT 1 -> nothing{again}", "there is one door")
        for database, again in (("[!m]*", ""), ("mariadb", ""), ("mysql", " (2)"))
    ),
    Excuse(
        *("postgresql", "leave_[rs]*", "set_config('synchronous_commit', 'off', true) IS NOT NULL -> TRUE*"),
        "it is said for the door and for the share, whichever comes first, and one is enough",
    ),
    Excuse(
        *("postgresql", "leave_[rs]*", "set_config('lock_timeout', '20ms', true) IS NOT NULL -> TRUE*"),
        "the part that comes first sets it for the other one; which that is depends on the plan",
        sure=False,
    ),
    Excuse(*("postgresql", "leave_[rs]*", "true -> TRUE"), "the same word"),
    Excuse(*("m*", "create", "TRUE -> TRUE"), "the same word"),
    Excuse(
        *("postgresql", "hand_over_local", "greatest(CAST(floor(* -> (CAST(floor(*"),
        "three quarters of a life are left, which is more than a millisecond",
    ),
    Excuse(
        *("m*", "unlogged", "* -> nothing"),
        "a setting of the session, which no statement of the lock reads",
    ),
    Excuse(
        *("postgresql", "[gh]*", "current_setting('synchronous_standby_names') = '' -> TRUE*"),
        "a setting of the server's, for which tests/faults/test_crash.py has one of its own",
    ),
    Excuse(
        *("postgresql", "grant", "current_setting('synchronous_standby_names') = '' -> FALSE"),
        "what a notification proves, tests/servers/test_listener.py has (test_a_notification_proves_what_was_granted)",
    ),
    Excuse(
        *("postgresql", "grant", "FOR UPDATE -> nothing"),
        "the deletion waits for the same row; it comes too late for a waiter that leaves within the 20 ms, which"
        " tests/faults/test_queue.py shows (test_a_waiter_that_leaves_as_it_is_granted_the_key)",
        sure=False,
    ),
    Excuse(
        *("mysql", "renew", "FORCE -> IGNORE (2)"),
        "the optimizer may take `locks_pin`, which leads to the same rows, and sometimes does",
        sure=False,
    ),
    Excuse(
        *("m*", "*", "STRAIGHT_JOIN -> JOIN*"),
        "the optimizer may begin with what is to be first by itself, and mostly does",
        sure=False,
    ),
    Excuse(*("sqlite", "[aclw]*", "CROSS -> nothing*"), "only the plan changes, which test_plans looks at"),
    Excuse(*("sqlite", "[ar]*", "LIMIT -1 -> nothing"), "only the plan changes, which test_plans looks at"),
    Excuse(*("postgresql", "[cl]*", "LIMIT 16 -> nothing"), "only the plan changes, which test_plans looks at"),
    Excuse(*("postgresql", "[cl]*", "ORDER BY owner -> *"), "a flow has fewer places: only the plan changes"),
    Excuse(
        *("postgresql", "note", "set_config('lock_timeout', '20ms', true) IS NOT NULL -> TRUE"),
        "nobody else has a row that is new; it is said of all that is asynchronous",
    ),
    *(Excuse("m*", name, "FORCE -> IGNORE*", "it locks nothing: only the plan changes") for name in _READING),
    Excuse(
        *("m*", "sleep_until_killed", "FORCE -> IGNORE*"),
        "it locks nothing: only the plan changes, and with it perhaps the order of the answer",
        sure=False,
    ),
    Excuse(*("mysql", "locate", "variable_value = 'ON' -> TRUE"), "MySQL itself knows nothing of Galera"),
    Excuse(
        *("m*", "*", "COLLATE utf8mb4_* -> nothing*"),
        "what is read from JSON is compared by the column's collation, which ends in _bin, unless its own does too:"
        " MariaDB lets a session choose such a default from 11.2 on",
    ),
)

MUTANTS: Final = [
    (database, name, mutant)
    for database in DATABASES
    for name, statement in statements(DIALECTS[database]).items()
    for mutant in mutants(effective(statement.sql, database))
]


def excuses(database: str, name: str, mutant: Mutant) -> list[Excuse]:
    """Those that speak of it."""
    pairs = (database, name, mutant.change)
    return [each for each in EQUIVALENT if all(map(fnmatchcase, pairs, each[:3]))]


@pytest.mark.parametrize(
    ("database", "name", "mutant"),
    [pytest.param(*each, id=f"{each[0]}-{each[1]}: {each[2].change}") for each in MUTANTS],
)
def test_mutant(laboratory: Callable[[str], Laboratory], database: str, name: str, mutant: Mutant) -> None:
    """Some case of the statement notices; none does if it is said to change nothing."""
    bench = laboratory(database)
    statement = replace(named(bench.dialect, name), sql=mutant.sql)
    caught = any(bench.differences(case, statement) for case in cases_of(name, database))
    assert bench.stillborn is None, "this mutant is no statement at all: see mutations"
    if excused := excuses(database, name, mutant):
        assert not (caught and all(each.sure for each in excused)), "a case notices: strike the excuse off"
    else:
        assert caught, f"survives: {statement.sql}"


@pytest.mark.parametrize(
    "excuse",
    [each for each in EQUIVALENT if any(fnmatchcase(database, each.on) for database in DATABASES)],
    ids=lambda excuse: " ".join(excuse[:3]),
)
def test_excuse(excuse: Excuse) -> None:
    """Every excuse speaks of some mutant."""
    assert any(excuse in excuses(*each) for each in MUTANTS)
