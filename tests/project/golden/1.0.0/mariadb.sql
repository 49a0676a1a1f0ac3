CREATE TABLE locks (
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL PRIMARY KEY,
    owner varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl double precision NOT NULL,
    acquired_at datetime(6) NOT NULL,
    expires_at datetime(6) NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    revoked_fence bigint DEFAULT 0 NOT NULL,
    freed_fence bigint DEFAULT 0 NOT NULL,
    revocation varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT '' NOT NULL,
    kind integer DEFAULT 0 NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    awaiting_fence bigint DEFAULT 0 NOT NULL,
    awaiting_channel varchar(63) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT '' NOT NULL
) ENGINE = InnoDB;
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
CREATE TABLE lock_waiters (
    owner varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL PRIMARY KEY,
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    ticket bigint NOT NULL,
    ttl double precision NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    channel varchar(63) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    circle varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin DEFAULT '' NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    joined_at datetime(6) NOT NULL,
    expires_at datetime(6) NOT NULL
) ENGINE = InnoDB;
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);
CREATE TABLE lock_events (
    id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    kind varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    fence bigint NOT NULL,
    seconds double precision NOT NULL,
    detail varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    happened_at datetime(6) NOT NULL
) ENGINE = InnoDB;
CREATE INDEX lock_events_of_key ON lock_events (lock_key, id);
CREATE TABLE lock_epoch (
    id integer NOT NULL PRIMARY KEY,
    server varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    history float NOT NULL,
    since datetime(6) NOT NULL,
    opens_at datetime(6) NOT NULL,
    floor bigint NOT NULL
) ENGINE = InnoDB;
INSERT INTO lock_epoch (id, server, history, since, opens_at, floor)
SELECT 1, /*M! CONCAT_WS(' ', @@server_id, @@hostname, @@port) */ /*!80017 @@server_uuid */, 1234567, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), 0;
CREATE TABLE IF NOT EXISTS lock_states (
    lock_key varchar(255) CHARACTER SET utf8mb4 /*M! COLLATE utf8mb4_nopad_bin */ /*!80017 COLLATE utf8mb4_0900_bin */ NOT NULL PRIMARY KEY,
    fence bigint NOT NULL,
    writes bigint NOT NULL,
    state longtext CHARACTER SET utf8mb4 NOT NULL
) ENGINE = InnoDB;
