"""The epoch: since when this server answers for the locks, and from when on it lets tenures begin.

A standby that is promoted, or a backup that is restored, may lack what the old primary has answered last: a client may
trust a tenure of which this server has no row. So the statements that begin a tenure, or let somebody enter one, ask
the one row of `lock_epoch` (`Vocabulary.is_open`). It names the `server` that wrote it. On any other server the
condition is false, until a client that was refused writes the row anew (`begin`): from then on all keys are closed
until `opens_at`.

    server      PostgreSQL: the start of the server process, which is read without a lock; where its last recovery from
                a crash has ended (when one session dies by a signal the others start anew, and the server process does
                not); and the number of the table, which a restored dump changes. MySQL: server_uuid.
                MariaDB: server_id, host and port; two servers of a replication never share a server_id.
                Galera and group replication: one name for all nodes, as no commit is answered that a majority lacks
    history     PostgreSQL: the timeline, which each promotion and each recovery from an archive changes, the number of
                the table, and the cluster. If the server has started anew with the same ones, it was stopped, or
                crashed, and has lost nothing that was answered: `since`, `floor` and, unless takes commit
                asynchronously, `opens_at` stay
    since       when the server was first found
    opens_at    when keys open
    floor       a number above all fences that the old primary can have given, whose clock may be ahead by `MARGIN`. A
                row with a lower fence shows a tenure of the old primary's time. Its key may since have had a tenure as
                long as that one, and is closed until `since` + ttl as well. Negative: it is not, as somebody says that
                nobody can trust such a tenure; but its fence may have been returned
    restarted_at  PostgreSQL: when the server has started anew, if that has closed the keys

    asynchronous_ttl  PostgreSQL: a statement that begins or lengthens a lease of at most so many seconds does not wait
                for the disk; 0 if all do. Negative: all do again, but some may have done so since the last start

Keys are closed for `MARGIN` at least, so that the clock has passed the floor when a tenure begins: fences, which come
from the clock, stay above all earlier ones. A reader's fence comes from the door's row instead, and is one more than
its fence. Where a later tenure of the door may have been lost the reader takes the door first (`is_latest`).

Renewals do not ask. A tenure in the table is the key's last one; or its holder has given it back since, or has let its
lease end, and no longer trusts it; or an administrator has ended it, as always at the risk of two holders.

A crash undoes the latest commits that did not wait, all of them from some moment on. So it counts as a promotion: from
when the server is found to have started anew all keys are closed for `asynchronous_ttl`. A lease that a crash has
undone, or shortened, was given before the crash and lasts no longer than that: it is over when keys open. After a clean
start a crash may lie before the one that nobody saw, so that the time counts from the start. A client that asks for
memory speed raises the number (`relax`), which is on disk before any statement can read it; each statement reads it in
the snapshot in which it decides, so that no two processes disagree. It is lowered by its sign only (`restore`): a
statement that began earlier may still commit asynchronously, and the next start closes the keys a last time.

What a crash may undo, and why that is no harm:

    take, create, read, slots   nobody else begins before the lease is over; fences come from the clock, those of
                                readers from a tenure of the door that began after the crash
    renew, extend, reenter      the row ends early, as its holder finds out, and the key is closed until then. The count
                                of a re-entry is sent with the release
    grant, hand-over            the row shows an earlier holder, who knows that its tenure is over, and keeps the key
                                closed. A grant tells when its lease ends, as a heartbeat after the crash finds the
                                place again
    accept, heartbeat           the tenure, or the place, ends early, as for a renewal
    downgrade                   the row shows the writer's tenure, which is over
    a leader's term             is the tenure of a lock
    guard()                     a transaction that commits durably makes durable what it has read: the log is one, and
                                loses only its end
    confirm                     is repeated

Durable as ever are `detach`, `attach` and `adopt`: a token whose use is undone could be used once more, beside the
tenure that its first bearer renews; and the words of an administrator, `free` and `revoke`.

Where commits wait for standbys an asynchronous one does not, so that a standby which is promoted may lack it: keys are
closed for `asynchronous_ttl` at least, whatever the setting for a failover says.

SQLite has no replicas, and its statements ask nothing.

Rule: a server names itself; no client says which server it believes to be on.
"""

from __future__ import annotations

from typing import Final

from dblock.core.statements.base import CLUSTER, Epochs, Reply, Statement
from dblock.core.statements.vocabulary import Vocabulary
from dblock.core.values import MARGIN

_COLUMNS: Final = "id, server, history, since, opens_at, floor"


def _history(words: Vocabulary) -> str:
    """A restart changes none of these; a promotion the timeline, a restored dump the table or the cluster."""
    cluster = "(SELECT system_identifier FROM pg_control_system())"
    return f"concat_ws(' ', {words.timeline}, {words.epoch_table}, {cluster})" if words.timeline else "''"


def epochs(words: Vocabulary) -> Epochs:
    """The statements in the vocabulary of PostgreSQL, MySQL or MariaDB. `Epochs` describes each."""
    # Sent with the tables, which nobody has used: keys are open.
    first = f"""
INSERT INTO lock_epoch ({_COLUMNS})
SELECT 1, {words.server}, {_history(words)}, {words.now}, {words.now}, 0
"""
    # Safe: reads only.
    status = f"""
SELECT CASE WHEN server = {words.server} THEN 1 ELSE 0 END, {words.since("since")}, {words.until("opens_at")}, floor,
       CASE WHEN restarted_at > since THEN {words.since("restarted_at")} END, asynchronous_ttl
FROM lock_epoch WHERE id = 1
"""
    # Safe: an administrator's word. The clock has passed the floor.
    end = f"""
{words.at_once}UPDATE lock_epoch SET
    opens_at = {words.greatest}({words.least}(opens_at, {words.now}), {words.after(str(MARGIN), "since")}),
    floor = - abs(floor)
WHERE id = 1 AND server = {words.server} {words.durable}
"""
    # Safe: it only grows, and is on disk before a statement can read it.
    relax = f"""
{words.at_once}UPDATE lock_epoch SET asynchronous_ttl = {words.greatest}(abs(asynchronous_ttl), :seconds)
WHERE id = 1 AND asynchronous_ttl < :seconds {words.durable}
"""
    # Safe: if it arrives late, what another client has relaxed since is durable again. A restart still closes the keys.
    restore = f"""
{words.at_once}UPDATE lock_epoch SET asynchronous_ttl = - asynchronous_ttl
WHERE id = 1 AND asynchronous_ttl > 0 {words.durable}
"""
    return Epochs(
        Statement("first_epoch", first, Reply.COUNT),
        Statement("epoch_status", status, Reply.ROWS, priority=True),
        Statement("begin_epoch", _begin(words), Reply.COUNT, priority=True),
        Statement("end_quarantine", end, Reply.COUNT),
        Statement("relax", relax, Reply.COUNT, priority=True) if words.crash else None,
        Statement("restore", restore, Reply.COUNT) if words.crash else None,
    )


def _begin(words: Vocabulary) -> str:
    """Safe: of two that find another server's row one writes it, and the other finds it written.

    If it arrives twice the second one changes nothing. Durable, as are the takes that rely on it. Where there is no row
    nobody has used the tables, or somebody has emptied them, tenures and all: keys are open.
    """
    seconds = words.greatest + f"(:seconds, {MARGIN})"
    floor = f"{words.micros} + {int(MARGIN * 1_000_000)}"
    if not words.timeline:
        cluster = f"VALUES(server) = {CLUSTER}"
        kept = "lock_epoch.server = VALUES(server)"
        return f"""
INSERT INTO lock_epoch ({_COLUMNS})
SELECT 1, {words.server}, '', {words.now}, {words.now}, 0 FROM (SELECT 1 AS one) AS this
ON DUPLICATE KEY UPDATE
    since = IF({kept}, lock_epoch.since, VALUES(since)),
    opens_at = IF({kept}, lock_epoch.opens_at, {words.after(f"IF({cluster}, 0, {seconds})")}),
    floor = IF({kept}, lock_epoch.floor, IF({cluster}, 0, IF(:seconds = 0, -1, 1) * ({floor}))),
    server = VALUES(server)
"""
    undoable = f"{words.greatest}(abs(lock_epoch.asynchronous_ttl), excluded.asynchronous_ttl)"
    span = f"{words.greatest}(CAST(:seconds AS double precision), {MARGIN}, {undoable})"
    restart = f"CASE WHEN {words.crash} IS NULL THEN {words.started} ELSE {words.now} END"
    no_quarantine = "CAST(:seconds AS double precision) = 0"
    reopens = f"{words.greatest}(lock_epoch.opens_at, {words.after(undoable, restart)})"
    changes = {  # after a restart; on another server
        "since": ("lock_epoch.since", words.now),
        "opens_at": (reopens, words.after(span)),
        "floor": ("lock_epoch.floor", f"CASE WHEN {no_quarantine} THEN -1 ELSE 1 END * ({floor})"),
        "restarted_at": (f"CASE WHEN lock_epoch.asynchronous_ttl <> 0 THEN {restart} END", "NULL"),
    }
    changed = ",\n    ".join(
        f"{name} = CASE WHEN lock_epoch.history = excluded.history THEN {restarted} ELSE {promoted} END"
        for name, (restarted, promoted) in changes.items()
    )
    return f"""
INSERT INTO lock_epoch ({_COLUMNS}, asynchronous_ttl)
SELECT 1, {words.server}, {_history(words)}, {words.now}, {words.now}, 0, CAST(:asynchronous_ttl AS double precision)
WHERE true {words.durable}
ON CONFLICT (id) DO UPDATE SET server = excluded.server, history = excluded.history,
    {changed},
    asynchronous_ttl = {words.greatest}(lock_epoch.asynchronous_ttl, excluded.asynchronous_ttl)
WHERE lock_epoch.server <> excluded.server
"""
