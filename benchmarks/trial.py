"""The least that a queue of one durable statement per hand-over costs: bare SQL, a datagram, and nothing else.

No leases, no clocks, no crashes, no second database: a yardstick, not a lock. It joins by an asynchronous statement and
grants by a durable one (as dblock does where nothing covers the grant) over a bare psycopg cursor, and tells the next
one its fence with a digest.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable

import psycopg

TABLES = """
CREATE TABLE IF NOT EXISTS trial (key text PRIMARY KEY, owner text, fence bigint, last bigint, served bigint)
    WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS trial_waiters (owner text PRIMARY KEY, ticket bigint, channel text) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS trial_queue ON trial_waiters (ticket);
INSERT INTO trial VALUES ('hot', NULL, 0, 0, 0) ON CONFLICT DO NOTHING;
"""
TAKE = """
UPDATE trial SET owner = %s, fence = fence + 1 WHERE key = 'hot' AND owner IS NULL AND last = served RETURNING fence
"""
JOIN = """
WITH announced AS (
    UPDATE trial SET last = last + 1 WHERE key = 'hot' AND set_config('synchronous_commit', 'off', true) <> ''
    RETURNING last, owner
), joined AS (INSERT INTO trial_waiters SELECT %s, last, %s FROM announced)
SELECT last, owner FROM announced
"""
GRANT = """
WITH next AS MATERIALIZED (SELECT owner, ticket, channel FROM trial_waiters ORDER BY ticket LIMIT 1 FOR UPDATE),
granted AS (
    UPDATE trial SET owner = next.owner, fence = fence + 1, served = ticket FROM next
    WHERE key = 'hot' AND (trial.owner = %s OR trial.owner IS NULL)
    RETURNING next.owner, next.channel, fence
), gone AS (DELETE FROM trial_waiters USING granted WHERE trial_waiters.owner = granted.owner)
SELECT owner, channel, fence FROM granted
"""
FREE = """
UPDATE trial SET owner = NULL WHERE key = 'hot' AND owner = %s
  AND set_config('synchronous_commit', 'off', true) <> '' RETURNING last > served
"""


def trial(url: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Take and give, for one process."""
    connection = psycopg.connect(url.replace("+psycopg", ""), autocommit=True, prepare_threshold=0)
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(1)")
        for statement in TABLES.split(";")[:-1]:
            connection.execute(statement)
    cursor, channel = connection.cursor(), "trial_" + secrets.token_hex(8)
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    box.bind("\0" + channel)
    owner = ""

    def grant(mine: str) -> bool:
        heir = cursor.execute(GRANT, (mine,)).fetchone()
        if heir is not None:
            token, where, fence = heir
            box.sendto(f"{fence} {_digest(token, fence)}".encode(), "\0" + where)
        return heir is not None

    def take() -> None:
        nonlocal owner
        owner = secrets.token_hex(16)
        if cursor.execute(TAKE, (owner,)).fetchone() is not None:
            return
        [(_, holder)] = cursor.execute(JOIN, (owner, channel)).fetchall()
        if holder is None:
            grant("")
        while True:
            fence, _, digest = box.recv(200).decode().partition(" ")
            if hmac.compare_digest(digest, _digest(owner, int(fence))):
                return

    def give() -> None:
        if not grant(owner):
            [(waiting,)] = cursor.execute(FREE, (owner,)).fetchall()
            if waiting:
                grant("")

    return take, give


def _digest(owner: str, fence: int) -> str:
    return hmac.new(owner.encode(), str(fence).encode(), hashlib.sha256).hexdigest()
