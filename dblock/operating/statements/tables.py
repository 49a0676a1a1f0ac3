"""The tables in plain SQL, for those who make them by hand; the faces' migrations make the same."""

from __future__ import annotations

from dblock.core.statements.dialect import Dialect


def plain_sql(dialect: Dialect) -> str:
    """What makes the tables of a dialect, under their names."""
    words = dialect.words
    short, long, name = words.text.format(64), words.text.format(255), words.text.format(63)
    who = f"""
    label {long} NOT NULL,
    host {long} NOT NULL,
    pid integer NOT NULL,
    thread {long} NOT NULL,
    program {long} NOT NULL,
    celery_task_id {long} NOT NULL,"""
    made = f"""\
CREATE TABLE locks (
    lock_key {long} NOT NULL PRIMARY KEY,
    owner {short},
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl {words.seconds} NOT NULL,
    acquired_at {words.time} NOT NULL,
    expires_at {words.time} NOT NULL,{who}
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    revoked_fence bigint DEFAULT 0 NOT NULL,
    freed_fence bigint DEFAULT 0 NOT NULL,
    revocation {long} DEFAULT '' NOT NULL,
    kind integer DEFAULT 0 NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    awaiting_fence bigint DEFAULT 0 NOT NULL,
    awaiting_channel {name} DEFAULT '' NOT NULL
){words.room}{words.table_options};
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
CREATE TABLE lock_waiters (
    owner {short} NOT NULL PRIMARY KEY,
    lock_key {long} NOT NULL,
    ticket bigint NOT NULL,
    ttl {words.seconds} NOT NULL,{who}
    channel {name} NOT NULL,
    circle {short} DEFAULT '' NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    joined_at {words.time} NOT NULL,
    expires_at {words.time} NOT NULL
){words.room}{words.table_options};
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);
CREATE TABLE lock_events (
    id {words.serial},
    lock_key {long} NOT NULL,
    kind {short} NOT NULL,
    fence bigint NOT NULL,
    seconds {words.seconds} NOT NULL,
    detail {long} NOT NULL,{who}
    happened_at {words.time} NOT NULL
){words.table_options};
CREATE INDEX lock_events_of_key ON lock_events (lock_key, id);
CREATE TABLE lock_epoch (
    id integer NOT NULL PRIMARY KEY,
    server {long} NOT NULL,
    history {"float" if words.undumped else long} NOT NULL,
    since {words.time} NOT NULL,
    opens_at {words.time} NOT NULL,
    floor bigint NOT NULL
){words.table_options};
"""
    made = dialect.tables.named(made, dialect.quote)
    return made if dialect.epoch is None else f"{made}{dialect.epoch.first.sql.strip()};\n"
