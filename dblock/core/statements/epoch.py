"""The epoch: since when this server answers for the locks, and from when on it lets tenures begin.

A standby that is promoted, or a backup that is restored, may lack what the old primary has answered last: a client may
trust a tenure of which this server has no row. So the statements that begin a tenure, or let somebody enter one, ask
the one row of `lock_epoch` (`Vocabulary.is_open`). It names the `server` that wrote it. On any other server the
condition is false, until a client that was refused writes the row anew (`begin`): from then on all keys are closed
until `opens_at`. A client that finds a key held writes it too: what the old primary had answered ends by the same
moment, whichever key is wanted, and the tenure that is shown is one that this server has.

    server      PostgreSQL: the start of the server process, which is read without a lock, and the number of the table,
                which a restored dump changes. MySQL: server_uuid. MariaDB: server_id, host and port; two servers of a
                replication never share a server_id.
                Galera and group replication: one name for all nodes, as no commit is answered that a majority lacks
    history     PostgreSQL: the timeline, which each promotion and each recovery from an archive changes, the number of
                the table, and the cluster. If the server has started anew with the same ones, it was stopped, or
                crashed, and has lost nothing that was answered: `since`, `opens_at` and `floor` stay
                MySQL and MariaDB: a `float` of seven digits, `undumped`. They write a `float` as text with six, so a
                dump has another number, and the restored row is no server's. A replica, a node, an ALTER TABLE and a
                copy of the files keep it. (The table's time of creation costs a take on MySQL 0.6 ms, and differs by
                node)
    since       when the server was first found
    opens_at    when keys open
    floor       a number above all fences that the old primary can have given, whose clock may be ahead by `MARGIN`. A
                row with a lower fence shows a tenure of the old primary's time. Its key may since have had a tenure as
                long as that one, and is closed until `since` + ttl as well. Negative: it is not, as somebody says that
                no tenure was lost; but its fence may have been returned

The end of a lease in a row below the floor may be by the clock of the old primary, which may be behind this server's by
`MARGIN`. Therefore a tenure that begins on such a row, or deletes it, waits for so long after that end, whatever the
sign of the floor. A row that was given back has no lease; and who goes on with the row's own tenure waits for none.

Keys are closed for `MARGIN` at least, so that the clock has passed the floor when a tenure begins: fences, which come
from the clock, stay above all earlier ones. A reader's fence comes from the door's row instead, and is one more than
its fence. Where a later tenure of the door may have been lost the reader takes the door first (`is_latest`).

Renewals do not ask. A tenure in the table is the key's last one; or its holder has given it back since, or has let its
lease end, and no longer trusts it; or an administrator has ended it, as always at the risk of two holders.

SQLite has no replicas, and its statements ask nothing.

Rule: a server names itself; no client says which server it believes to be on.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dblock.core.statements.base import CLUSTER, Reply, Statement
from dblock.core.statements.vocabulary import Vocabulary
from dblock.core.values import MARGIN

_COLUMNS: Final = "id, server, history, since, opens_at, floor"


class Epochs(NamedTuple):
    """The statements on the row of `lock_epoch`."""

    first: Statement
    """Write the row of tables that were made a moment ago."""
    status: Statement
    """Read the row -> whether this server wrote it, seconds since it was first found, seconds until keys open (0 or
    less if they are open), floor; nothing if there is no row."""
    begin: Statement
    """Write the row, unless this server wrote it: keys are closed for `seconds`, unless it has only restarted."""
    end: Statement
    """Open the keys now, if this server wrote the row -> one row."""
    close: Statement
    """Close the keys for `seconds`, as for a server that is another one than the last."""


def epochs(words: Vocabulary) -> Epochs:
    """The statements in the vocabulary of PostgreSQL, MySQL or MariaDB. `Epochs` describes each."""
    # Sent with the tables, which nobody has used: keys are open.
    first = f"""
INSERT INTO lock_epoch ({_COLUMNS})
SELECT 1, {words.server}, {words.history}, {words.now}, {words.now}, 0
"""
    # Safe: reads only.
    status = f"""
SELECT CASE WHEN {words.wrote("lock_epoch")} THEN 1 ELSE 0 END, {words.since("since")}, {words.until("opens_at")}, floor
FROM lock_epoch WHERE id = 1
"""
    # Safe: an administrator's word. The clock has passed the floor.
    end = f"""
{words.at_once}UPDATE lock_epoch SET
    opens_at = {words.greatest}({words.least}(opens_at, {words.now}), {words.after(str(MARGIN), "since")}),
    floor = - abs(floor)
WHERE id = 1 AND {words.wrote("lock_epoch")} {words.durable}
"""
    floor = f"{words.micros} + {int(MARGIN * 1_000_000)}"
    # Safe: an administrator's word. If it arrives late or twice keys are closed for longer. Durable, as `begin`.
    close = f"""
{words.at_once}UPDATE lock_epoch SET
    server = {words.server},
    history = {words.history},
    since = {words.now},
    opens_at = {words.after(f"{words.greatest}({words.number(':seconds')}, {MARGIN})")},
    floor = {floor}
WHERE id = 1 {words.durable}
"""
    return Epochs(
        Statement("first_epoch", first, Reply.COUNT),
        Statement("epoch_status", status, Reply.ROWS),
        Statement("begin_epoch", _begin(words, floor), Reply.COUNT),
        Statement("end_quarantine", end, Reply.COUNT),
        Statement("begin_quarantine", close, Reply.COUNT),
    )


def _begin(words: Vocabulary, floor: str) -> str:
    """Safe: of two that find another server's row one writes it, and the other finds it written.

    If it arrives twice the second one changes nothing. Durable, as are the takes that rely on it. Where there is no row
    nobody has used the tables, or somebody has emptied them, tenures and all: keys are open.
    """
    seconds = words.number(":seconds")
    if words.undumped:
        undumped = "lock_epoch.history = VALUES(history)"
        cluster = f"VALUES(server) = {CLUSTER} AND {undumped}"
        kept = f"lock_epoch.server = VALUES(server) AND {undumped}"
        seconds = f"{words.greatest}({seconds}, {MARGIN})"
        return f"""
INSERT INTO lock_epoch ({_COLUMNS})
SELECT 1, {words.server}, {words.history}, {words.now}, {words.now}, 0 FROM (SELECT 1 AS one) AS this
ON DUPLICATE KEY UPDATE
    since = IF({kept}, lock_epoch.since, VALUES(since)),
    opens_at = IF({kept}, lock_epoch.opens_at, {words.after(f"IF({cluster}, 0, {seconds})")}),
    floor = IF({kept}, lock_epoch.floor, IF({cluster}, 0, IF(:seconds = 0, -1, 1) * ({floor}))),
    server = VALUES(server),
    history = VALUES(history)
"""
    kept = "WHEN lock_epoch.history = excluded.history THEN lock_epoch"  # by a restart
    return f"""
INSERT INTO lock_epoch ({_COLUMNS})
SELECT 1, {words.server}, {words.history}, {words.now}, {words.now}, 0
WHERE true {words.durable}
ON CONFLICT (id) DO UPDATE SET server = excluded.server, history = excluded.history,
    since = CASE {kept}.since ELSE {words.now} END,
    opens_at = CASE {kept}.opens_at ELSE {words.after(f"{words.greatest}({seconds}, {MARGIN})")} END,
    floor = CASE {kept}.floor ELSE CASE WHEN {seconds} = 0 THEN -1 ELSE 1 END * ({floor}) END
WHERE lock_epoch.server <> excluded.server
"""
