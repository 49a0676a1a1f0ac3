CREATE TABLE locks (
    lock_key varchar(255) NOT NULL PRIMARY KEY,
    owner varchar(64),
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl real NOT NULL,
    acquired_at datetime NOT NULL,
    expires_at datetime NOT NULL,
    label varchar(255) NOT NULL,
    host varchar(255) NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) NOT NULL,
    program varchar(255) NOT NULL,
    celery_task_id varchar(255) NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    revoked_fence bigint DEFAULT 0 NOT NULL,
    freed_fence bigint DEFAULT 0 NOT NULL,
    revocation varchar(255) DEFAULT '' NOT NULL,
    kind integer DEFAULT 0 NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    awaiting_fence bigint DEFAULT 0 NOT NULL,
    awaiting_channel varchar(63) DEFAULT '' NOT NULL
);
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
CREATE TABLE lock_waiters (
    owner varchar(64) NOT NULL PRIMARY KEY,
    lock_key varchar(255) NOT NULL,
    ticket bigint NOT NULL,
    ttl real NOT NULL,
    label varchar(255) NOT NULL,
    host varchar(255) NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) NOT NULL,
    program varchar(255) NOT NULL,
    celery_task_id varchar(255) NOT NULL,
    channel varchar(63) NOT NULL,
    circle varchar(64) DEFAULT '' NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    joined_at datetime NOT NULL,
    expires_at datetime NOT NULL
);
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);
CREATE TABLE lock_events (
    id integer NOT NULL PRIMARY KEY AUTOINCREMENT,
    lock_key varchar(255) NOT NULL,
    kind varchar(64) NOT NULL,
    fence bigint NOT NULL,
    seconds real NOT NULL,
    detail varchar(255) NOT NULL,
    label varchar(255) NOT NULL,
    host varchar(255) NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) NOT NULL,
    program varchar(255) NOT NULL,
    celery_task_id varchar(255) NOT NULL,
    happened_at datetime NOT NULL
);
CREATE INDEX lock_events_of_key ON lock_events (lock_key, id);
CREATE TABLE lock_epoch (
    id integer NOT NULL PRIMARY KEY,
    server varchar(255) NOT NULL,
    history varchar(255) NOT NULL,
    since datetime NOT NULL,
    opens_at datetime NOT NULL,
    floor bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS lock_states (
    lock_key varchar(255) NOT NULL PRIMARY KEY,
    fence bigint NOT NULL,
    writes bigint NOT NULL,
    state text NOT NULL
);
