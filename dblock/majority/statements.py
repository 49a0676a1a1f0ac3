"""The statements of the majority lock (`dblock.majority.protocol`), which few applications need."""

from __future__ import annotations

from typing import Final, NamedTuple

from dblock.core.statements import mysql, postgresql, sqlite
from dblock.core.statements.base import Reply, Statement, WhenLocked
from dblock.core.statements.common import STEP, TENURE, take_if
from dblock.core.statements.vocabulary import Vocabulary
from dblock.core.values import SHARE

SERVER: Final = f"{SHARE}server"
"""The key of the row that says since when a server counts."""


class Quorum(NamedTuple):
    """The statements on one database."""

    take: Statement
    """As `take` of a lock, with a fence that is `proposed`, if it can be -> fence; and what `server` answers, if the
    database can answer more than a number."""
    confirm: Statement
    """Raise the fence of a live tenure to `raised`, and set its lease to end one life from now."""
    server: Statement
    """Read which table of which server it is (empty if unknown), when the server started, and the row of `record`:
    label, seconds since it was written, longest life."""
    record: Statement
    """Record the server, as `label`, from now on."""
    lengthen: Statement
    """Record a longer life."""


def _quorum(
    words: Vocabulary, *, identity: str, started: str, parameter: str, otherwise: str, into: str = "locks AS known"
) -> Quorum:
    # Safe: as the take of a lock. The proposed number comes from a client's clock: it is used if it is higher than the
    # database's, by a second at most.
    proposed = f"{words.least}({words.bigint(':proposed')}, {words.micros} + 1000000)"
    fence = f"{words.greatest}(fence + {STEP}, {words.micros}, {proposed})"
    before_waiters = f"(last_ticket = served_ticket OR {words.integer(':fair')} = 0)"
    known = f"FROM locks AS known WHERE known.lock_key = {parameter.format(':server')}"
    row = (
        f"(SELECT known.label {known}), (SELECT {words.since('known.acquired_at')} {known}), (SELECT known.ttl {known})"
    )
    take = take_if(words, before_waiters, fence=fence, answer=f"fence, {identity}, {started}, {row}")
    # Safe: names the tenure, and the fence only grows, so it may arrive late and twice. Durable: both are relied on.
    confirm = f"""
{words.change()}
    fence = {words.bigint(":raised")},
    expires_at = {words.after(":life")}
WHERE lock_key = :key AND owner = :owner AND fence >= {words.bigint(":fence")} AND fence <= {words.bigint(":raised")}
  AND expires_at > {words.now} {words.durable}
"""
    # Safe: reads only.
    server = f"""
SELECT {identity}, {started}, known.label, {words.since("known.acquired_at")}, known.ttl
FROM (SELECT 1 AS one) AS this LEFT JOIN locks AS known ON known.lock_key = {parameter.format(":key")}
"""
    # The longest lease that a copy still knows of stays. Safe: if it arrives late or twice the server counts later.
    # Durable: a crash would only make it count later too, but others would have been told that it is known.
    record = f"""
INSERT INTO {into} ({TENURE})
VALUES ({parameter.format(":key")}, NULL, 1, 0, :life, {words.now}, {words.after(":far")}, :label, '', 0, '', '', '',
        0, 0)
{otherwise}
"""
    # Safe: it only grows. Durable: the next to ask relies on it.
    lengthen = f"""
{words.change()} ttl = {words.greatest}(ttl, :life) WHERE lock_key = :key {words.durable}
"""
    return Quorum(
        Statement("take_proposed", take, words.numbers, row_locked=WhenLocked.SKIP, database_locked=WhenLocked.RAISE),
        Statement("confirm", confirm, Reply.COUNT, critical=True),
        Statement("server", server, Reply.ROWS, critical=True),
        Statement("record_server", record, Reply.COUNT, critical=True),
        Statement("lengthen_quarantine", lengthen, Reply.COUNT, critical=True),
    )


_CONFLICT: Final = """ON CONFLICT (lock_key) DO UPDATE SET label = excluded.label, acquired_at = excluded.acquired_at,
    ttl = {}(known.ttl, excluded.ttl)"""
_UPTIME: Final = """(SELECT CAST(variable_value AS signed)
    FROM /*M! information_schema.global_status */ /*!80017 performance_schema.global_status */
    WHERE variable_name = 'Uptime')"""
QUORUM: Final = {
    # A table that was made anew, or emptied and filled from a dump, has another file. A standby has the files of its
    # primary, and may have started in the same second: the moment of the start is told exactly, so it has to be equal.
    "postgresql": _quorum(
        postgresql.SQL,
        identity="""concat_ws(' ', CAST(CAST('locks' AS regclass) AS oid), pg_relation_filenode('locks'),
            extract(epoch FROM pg_postmaster_start_time()))""",
        started="0",
        parameter="CAST({} AS text)",
        otherwise=_CONFLICT.format("greatest"),
    ),
    "mysql": _quorum(
        mysql.SQL,
        identity="""CONCAT(/*M! CONCAT(@@hostname, ' ', @@server_id) */ /*!80017 @@server_uuid */, ' ',
            (SELECT CAST(UNIX_TIMESTAMP(create_time) AS signed) FROM information_schema.tables
             WHERE table_schema = DATABASE() AND table_name = 'locks'))""",
        started=f"UNIX_TIMESTAMP(SYSDATE(6)) - {_UPTIME}",
        parameter="{}",
        otherwise="""ON DUPLICATE KEY UPDATE label = VALUES(label), acquired_at = VALUES(acquired_at),
    ttl = GREATEST(ttl, VALUES(ttl))""",
        into="locks",
    ),
    "sqlite": _quorum(sqlite.SQL, identity="'file'", started="0", parameter="{}", otherwise=_CONFLICT.format("max")),
}
"""By the dialect's name."""
