CREATE TABLE locks (
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL PRIMARY KEY,
    owner varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin,
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl double precision NOT NULL,
    acquired_at datetime(6) NOT NULL,
    expires_at datetime(6) NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    revoked_fence bigint DEFAULT 0 NOT NULL,
    freed_fence bigint DEFAULT 0 NOT NULL,
    revocation varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin DEFAULT '' NOT NULL,
    kind integer DEFAULT 0 NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    awaiting_fence bigint DEFAULT 0 NOT NULL,
    awaiting_channel varchar(63) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin DEFAULT '' NOT NULL
) ENGINE = InnoDB;
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
CREATE TABLE lock_waiters (
    owner varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL PRIMARY KEY,
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    ticket bigint NOT NULL,
    ttl double precision NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    channel varchar(63) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    circle varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin DEFAULT '' NOT NULL,
    reading integer DEFAULT 0 NOT NULL,
    joined_at datetime(6) NOT NULL,
    expires_at datetime(6) NOT NULL
) ENGINE = InnoDB;
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);
CREATE TABLE lock_events (
    id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    lock_key varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    kind varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    fence bigint NOT NULL,
    seconds double precision NOT NULL,
    detail varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    label varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    host varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    program varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    celery_task_id varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    happened_at datetime(6) NOT NULL
) ENGINE = InnoDB;
CREATE INDEX lock_events_of_key ON lock_events (lock_key, id);
CREATE TABLE lock_epoch (
    id integer NOT NULL PRIMARY KEY,
    server varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
    history float NOT NULL,
    since datetime(6) NOT NULL,
    opens_at datetime(6) NOT NULL,
    floor bigint NOT NULL
) ENGINE = InnoDB;
INSERT INTO lock_epoch (id, server, history, since, opens_at, floor)
SELECT 1, /*M! CONCAT_WS(' ', @@server_id, @@hostname, @@port) */ /*!80017 @@server_uuid */, 1234567, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), 0;

-- take: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE (SELECT lock_key AS name
FROM locks FORCE INDEX (locks_pin)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (locks_pin)
ON locks.lock_key = mine.name
SET owner = :owner, fence = LAST_INSERT_ID(GREATEST(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), count = 1, reading = :reading, ttl = :ttl, acquired_at = UTC_TIMESTAMP(6), expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND, label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND kind = :kind
AND (owner IS NULL OR expires_at <= UTC_TIMESTAMP(6))
AND (last_ticket = served_ticket OR :fair = 0)
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6))
AND (abs(epoch.floor) < locks.fence OR locks.owner IS NULL OR locks.expires_at + INTERVAL ROUND(2.5 * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- create: one row with the number left by LAST_INSERT_ID(expr), if it changed something
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id, kind, reading)
SELECT :key, :owner, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))), 1, :ttl, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND, :label, :host, :pid, :thread, :program, :task, :kind, :reading FROM DUAL
WHERE TRUE
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6));

-- inspect: the rows it returns
SELECT owner, fence, count, ttl, TIMESTAMPDIFF(MICROSECOND, acquired_at, UTC_TIMESTAMP(6)) / 1e6, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6, label, host, pid, thread, program, celery_task_id, revoked_fence, freed_fence, revocation, kind, reading, CASE WHEN locks.awaiting_fence = locks.fence THEN 1 ELSE 0 END
FROM locks
WHERE lock_key = :key;

-- set_count: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET count = :count, expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6);

-- extend: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET ttl = :ttl, expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6);

-- renew: one empty row for each row that it changed
UPDATE (SELECT due.name, holder, number, life, not_notified FROM JSON_TABLE(:leases, '$[*]' COLUMNS ( name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.key', holder varchar(64) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.owner', number bigint PATH '$.fence', life double PATH '$.life', not_notified integer PATH '$.not_notified' )) AS due STRAIGHT_JOIN locks AS mine FORCE INDEX (PRIMARY)
ON mine.lock_key = due.name LIMIT 18446744073709551615 FOR UPDATE OF mine NOWAIT) AS due STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON lock_key = due.name
AND owner = due.holder
AND fence = due.number
AND expires_at > UTC_TIMESTAMP(6)
AND (revoked_fence <> fence OR not_notified = 0)
SET expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(due.life * 1000000) MICROSECOND);

-- alive: the rows it returns
SELECT lock_key, owner, fence, CASE WHEN revoked_fence = locks.fence THEN revocation END FROM JSON_TABLE(:leases, '$[*]' COLUMNS (name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.key', holder varchar(64) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.owner', number bigint PATH '$.fence')) AS due STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON lock_key = due.name
AND owner = due.holder
AND fence = due.number
AND expires_at > UTC_TIMESTAMP(6);

-- detach: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET owner = :heir, count = 0, ttl = :life, expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key
AND owner IN (:owner, :heir)
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6);

-- attach: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET count = 1, ttl = CASE WHEN owner = :heir THEN GREATEST(ttl, :ttl) ELSE :ttl END, expires_at = CASE WHEN owner = :heir THEN GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND) ELSE UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND END, owner = :heir, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND owner IN (:owner, :heir)
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6)
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- release: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE locks FORCE INDEX (PRIMARY)
SET owner = CASE WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND > GREATEST(UTC_TIMESTAMP(6), acquired_at) THEN '' END, expires_at = CASE WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND > GREATEST(UTC_TIMESTAMP(6), acquired_at) THEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND ELSE UTC_TIMESTAMP(6) END, count = 0
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND LAST_INSERT_ID(CASE WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND <= GREATEST(UTC_TIMESTAMP(6), acquired_at)
AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END) >= 0;

-- pin: the rows it returns
SELECT @@transaction_isolation = 'SERIALIZABLE' OR EXISTS (
SELECT 1
FROM locks AS seen
WHERE seen.lock_key = :key
AND seen.fence = :fence
AND @@transaction_isolation <> 'SERIALIZABLE')
FROM locks FORCE INDEX (locks_pin)
WHERE lock_key = :key LOCK IN SHARE MODE;

-- locate: the rows it returns
SELECT DATABASE(), (SELECT COUNT(*) FROM performance_schema .global_variables
WHERE variable_name = 'wsrep_on'
AND variable_value = 'ON');

-- stale: the rows it returns
SELECT lock_key, CASE WHEN expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
AND (kind = 0 OR NOT EXISTS (SELECT 1
FROM locks AS door FORCE INDEX (PRIMARY) STRAIGHT_JOIN locks AS share FORCE INDEX (PRIMARY)
ON share.lock_key > CONCAT(door.lock_key, CHAR(31 USING utf8mb4))
AND share.lock_key < CONCAT(door.lock_key, ' ')
WHERE door.lock_key = locks.lock_key
AND share.expires_at > UTC_TIMESTAMP(6))) THEN 1 ELSE 0 END
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key > :after ORDER BY lock_key LIMIT 100;

-- reap: one empty row for each row that it changed
DELETE locks FROM (SELECT due.name FROM JSON_TABLE(:names, '$[*]' COLUMNS (name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$')) AS due STRAIGHT_JOIN locks AS mine FORCE INDEX (locks_pin)
ON mine.lock_key = due.name FOR UPDATE OF mine NOWAIT) AS due STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = due.name
WHERE expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND
AND fence < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
AND (last_ticket <= served_ticket OR last_ticket < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) - 10000000)
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6))
AND (abs(epoch.floor) < locks.fence OR locks.owner IS NULL OR locks.expires_at + INTERVAL ROUND(2.5 * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)))
AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter FORCE INDEX (lock_waiters_queue)
WHERE waiter.lock_key = locks.lock_key
AND waiter.ticket > served_ticket
AND waiter.expires_at > UTC_TIMESTAMP(6));

-- join: one row with the number left by LAST_INSERT_ID(expr), if it changed something
INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel, reading, joined_at, expires_at)
SELECT :owner, lock_key, LAST_INSERT_ID(GREATEST(last_ticket + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), :ttl, :label, :host, :pid, :thread, :program, :task, :channel, :reading, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL ROUND(:waiter_ttl * 1000000) MICROSECOND
FROM locks
WHERE lock_key = :key
AND kind = :kind FOR SHARE NOWAIT;

-- announce: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE (SELECT lock_key AS name
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = mine.name
SET last_ticket = GREATEST(last_ticket, :ticket)
WHERE lock_key = :key
AND served_ticket < :ticket
AND LAST_INSERT_ID(CASE WHEN owner >= '' THEN GREATEST(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6, 0) * 1000 ELSE 0 END) >= 0;

-- queue_status: the rows it returns
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END, CASE WHEN locks.owner IS NULL THEN LEAST(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locks.expires_at) / 1e6, 0) ELSE TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locks.expires_at) / 1e6 END, served_ticket + 1, last_ticket, (SELECT CASE WHEN count(*) = 16
AND count(alive) = 0 THEN 1 ELSE count(alive) END FROM (
SELECT CASE WHEN other.expires_at > UTC_TIMESTAMP(6) THEN 1 END AS alive FROM lock_waiters AS other FORCE INDEX (lock_waiters_queue)
WHERE other.lock_key = :key
AND other.ticket < :ticket
AND other.ticket > (SELECT served_ticket
FROM locks AS theirs
WHERE theirs.lock_key = :key) ORDER BY other.ticket DESC LIMIT 16) AS nearest), (SELECT count(*) FROM lock_waiters AS me
WHERE me.owner = :owner
AND me.expires_at > UTC_TIMESTAMP(6))
FROM locks
WHERE locks.lock_key = :key;

-- grant: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE (
SELECT * FROM lock_waiters
WHERE owner = :heir
AND lock_key = :key
AND expires_at > UTC_TIMESTAMP(6) LIMIT 1 FOR UPDATE NOWAIT ) AS next STRAIGHT_JOIN (SELECT lock_key AS name
FROM locks FORCE INDEX (locks_pin)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (locks_pin) STRAIGHT_JOIN lock_waiters AS place FORCE INDEX (PRIMARY)
ON place.owner = next.owner
SET place.expires_at = place.joined_at, locks.owner = next.owner, locks.fence = LAST_INSERT_ID(GREATEST(locks.fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), locks.count = 1, locks.reading = next.reading, locks.ttl = next.ttl, locks.acquired_at = UTC_TIMESTAMP(6), locks.expires_at = LEAST(next.expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(next.ttl * 1000000) MICROSECOND), locks.label = next.label, locks.host = next.host, locks.pid = next.pid, locks.thread = next.thread, locks.program = next.program, locks.celery_task_id = next.celery_task_id, locks.last_ticket = GREATEST(locks.last_ticket, next.ticket), locks.served_ticket = next.ticket
WHERE locks.lock_key = :key
AND locks.served_ticket < next.ticket
AND (locks.owner IS NULL OR locks.expires_at <= UTC_TIMESTAMP(6) OR (locks.owner = :owner
AND locks.fence = :fence))
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6))
AND (abs(epoch.floor) < locks.fence OR locks.owner IS NULL OR locks.expires_at + INTERVAL ROUND(2.5 * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- accept: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE (SELECT lock_key AS name
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = mine.name
SET fence = LAST_INSERT_ID(fence), acquired_at = UTC_TIMESTAMP(6), expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key
AND owner = :owner
AND expires_at > UTC_TIMESTAMP(6)
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- adopt_place: one empty row for each row that it changed
UPDATE lock_waiters
SET owner = :heir, ttl = :ttl, label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task, reading = :reading, channel = :channel
WHERE owner = :owner
AND expires_at > UTC_TIMESTAMP(6);

-- hand_over_local: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE (SELECT lock_key AS name
FROM locks FORCE INDEX (locks_pin)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (locks_pin)
ON locks.lock_key = mine.name
SET owner = :heir, fence = LAST_INSERT_ID(GREATEST(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), count = 1, reading = :reading, ttl = :ttl, acquired_at = UTC_TIMESTAMP(6), expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND, label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND kind = :kind
AND (owner = :owner
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6))
AND (last_ticket = served_ticket OR :handovers_left > 0)
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- leave_queue: one empty row for each row that it changed
DELETE lock_waiters FROM JSON_TABLE(:owners, '$[*]' COLUMNS (holder varchar(64) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$')) AS due STRAIGHT_JOIN lock_waiters FORCE INDEX (PRIMARY)
ON owner = due.holder;

-- first_waiter: the rows it returns
SELECT ticket, channel, owner FROM lock_waiters FORCE INDEX (lock_waiters_queue)
WHERE lock_key = :key
AND ticket >= :first
AND expires_at > UTC_TIMESTAMP(6) ORDER BY ticket LIMIT 1;

-- call: the rows it returns
KILL QUERY IS_USED_LOCK(:channel);

-- sleep_until_killed: the rows it returns
SELECT lock_waiters.ticket, locks.lock_key FROM JSON_TABLE(:places, '$[*]' COLUMNS (name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$[0]', number bigint PATH '$[1]')) AS due STRAIGHT_JOIN lock_waiters FORCE INDEX (lock_waiters_queue)
ON lock_waiters.lock_key = due.name
AND lock_waiters.ticket = due.number STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = due.name
AND locks.owner = lock_waiters.owner UNION ALL
SELECT SLEEP(:seconds), '' FROM (SELECT 1) AS once
WHERE NOT EXISTS (SELECT 1 FROM JSON_TABLE(:places, '$[*]' COLUMNS (name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$[0]', number bigint PATH '$[1]')) AS due STRAIGHT_JOIN lock_waiters FORCE INDEX (lock_waiters_queue)
ON lock_waiters.lock_key = due.name
AND lock_waiters.ticket = due.number STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = due.name
AND locks.owner = lock_waiters.owner );

-- unlogged: the rows it returns
SET SESSION long_query_time = 3600, wait_timeout = 10;

-- listen: the rows it returns
SELECT GET_LOCK(:channel, :seconds);

-- heartbeat: one empty row for each row that it changed
UPDATE JSON_TABLE(:owners, '$[*]' COLUMNS (holder varchar(64) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$')) AS due STRAIGHT_JOIN lock_waiters FORCE INDEX (PRIMARY)
ON owner = due.holder
AND expires_at > UTC_TIMESTAMP(6)
SET expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:waiter_ttl * 1000000) MICROSECOND);

-- chain: the rows it returns
WITH RECURSIVE linked (owner, lock_key, ticket, host, pid, thread, holder, circle) AS (
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread, held.owner, waiter.circle FROM lock_waiters AS waiter STRAIGHT_JOIN locks AS held FORCE INDEX (PRIMARY)
ON held.lock_key = waiter.lock_key
WHERE waiter.expires_at > UTC_TIMESTAMP(6)
AND held.expires_at > UTC_TIMESTAMP(6)
AND waiter.ticket + 0 > held.served_ticket
AND held.owner IS NOT NULL
AND held.owner <> waiter.owner
AND held.count > 0
AND waiter.owner = :owner UNION
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread, held.owner, waiter.circle FROM linked STRAIGHT_JOIN lock_waiters AS waiter FORCE INDEX (PRIMARY)
ON waiter.owner >= substr(linked.holder, 1, 24)
AND waiter.owner < CONCAT(substr(linked.holder, 1, 24), 'g') STRAIGHT_JOIN locks AS held FORCE INDEX (PRIMARY)
ON held.lock_key = waiter.lock_key
WHERE waiter.expires_at > UTC_TIMESTAMP(6)
AND held.expires_at > UTC_TIMESTAMP(6)
AND waiter.ticket + 0 > held.served_ticket
AND held.owner IS NOT NULL
AND held.owner <> waiter.owner
AND held.count > 0 )
SELECT owner, lock_key, ticket, host, pid, thread, holder, circle FROM linked;

-- confirm: one empty row for each row that it changed
UPDATE lock_waiters FORCE INDEX (PRIMARY)
SET circle = :circle
WHERE owner = :owner
AND expires_at > UTC_TIMESTAMP(6);

-- clear: one empty row for each row that it changed
UPDATE (SELECT lock_key AS name
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = mine.name
SET served_ticket = last_ticket
WHERE lock_key = :key
AND last_ticket = :last
AND served_ticket < last_ticket
AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
WHERE other.lock_key = :key
AND other.ticket > served_ticket
AND other.expires_at > UTC_TIMESTAMP(6));

-- dead: the rows it returns
SELECT owner, CASE WHEN expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND THEN 1 ELSE 0 END FROM lock_waiters FORCE INDEX (PRIMARY)
WHERE owner > :after ORDER BY owner LIMIT 100;

-- forget: one empty row for each row that it changed
DELETE lock_waiters FROM (SELECT due.name FROM JSON_TABLE(:names, '$[*]' COLUMNS (name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$')) AS due STRAIGHT_JOIN lock_waiters AS mine FORCE INDEX (PRIMARY)
ON mine.owner = due.name FOR UPDATE OF mine NOWAIT) AS due STRAIGHT_JOIN lock_waiters FORCE INDEX (PRIMARY)
ON lock_waiters.owner = due.name
WHERE expires_at < UTC_TIMESTAMP(6) - INTERVAL ROUND(:retention * 1000000) MICROSECOND;

-- read: one row with the number left by LAST_INSERT_ID(expr), if it changed something
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id, kind, reading)
SELECT :key, :owner, LAST_INSERT_ID(door.fence + 1), 1, :ttl, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND, :label, :host, :pid, :thread, :program, :task, :kind, 1
FROM locks AS door FORCE INDEX (PRIMARY)
WHERE door.lock_key = :door
AND door.kind = :kind
AND ((:holder = ''
AND door.reading = 1) OR (door.owner = :holder
AND door.fence = :holders_fence
AND door.expires_at > UTC_TIMESTAMP(6)))
AND (:admitted = 1 OR door.last_ticket = door.served_ticket OR NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter FORCE INDEX (lock_waiters_queue)
WHERE waiter.lock_key = :door
AND waiter.ticket > door.served_ticket
AND waiter.expires_at > UTC_TIMESTAMP(6)
AND waiter.reading = 0))
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < door.fence OR epoch.since + INTERVAL ROUND(door.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6))
AND (:holder <> '' OR abs(epoch.floor) < door.fence)) FOR SHARE OF door NOWAIT;

-- take_slot: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE (SELECT lock_key AS name
FROM locks FORCE INDEX (locks_pin)
WHERE lock_key = :key LIMIT 1 FOR UPDATE NOWAIT) AS mine STRAIGHT_JOIN locks FORCE INDEX (locks_pin)
ON locks.lock_key = mine.name
SET owner = :owner, fence = LAST_INSERT_ID(GREATEST(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), count = 1, reading = :reading, ttl = :ttl, acquired_at = UTC_TIMESTAMP(6), expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND, label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND kind = :kind
AND (owner IS NULL OR expires_at <= UTC_TIMESTAMP(6))
AND EXISTS (SELECT 1 FROM (
SELECT door.lock_key
FROM locks AS door FORCE INDEX (PRIMARY)
WHERE door.lock_key = :door
AND door.kind = :kind
AND (door.last_ticket = door.served_ticket OR :fair = 0)
AND (door.owner IS NULL OR door.expires_at <= UTC_TIMESTAMP(6)) LIMIT 1 FOR SHARE NOWAIT ) AS seen)
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6))
AND (abs(epoch.floor) < locks.fence OR locks.owner IS NULL OR locks.expires_at + INTERVAL ROUND(2.5 * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- alone: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET awaiting_fence = -fence, acquired_at = UTC_TIMESTAMP(6), expires_at = GREATEST(expires_at, UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND)
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6)
AND NOT EXISTS (SELECT 1 FROM (
SELECT share.lock_key
FROM locks AS share FORCE INDEX (PRIMARY)
WHERE share.lock_key > :low
AND share.lock_key < :high LIMIT 1) AS seen);

-- await_leaving: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET awaiting_fence = fence, awaiting_channel = :channel, expires_at = UTC_TIMESTAMP(6) + INTERVAL ROUND(:life * 1000000) MICROSECOND
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > UTC_TIMESTAMP(6)
AND awaiting_fence <> -fence;

-- listed: the rows it returns
SELECT lock_key, owner, fence, CASE WHEN owner IS NULL THEN LEAST(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6, 0) ELSE TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at) / 1e6 END
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key > :low
AND lock_key < :high ORDER BY lock_key LIMIT :most;

-- end_expired: one empty row for each row that it changed
DELETE locks FROM (SELECT due.name FROM JSON_TABLE(:names, '$[*]' COLUMNS (name varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$')) AS due STRAIGHT_JOIN locks AS mine FORCE INDEX (locks_pin)
ON mine.lock_key = due.name FOR UPDATE OF mine NOWAIT) AS due STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = due.name
WHERE (owner IS NULL OR expires_at <= UTC_TIMESTAMP(6))
AND EXISTS (SELECT 1 FROM lock_epoch AS epoch
WHERE epoch.id = 1
AND epoch.server = @@server_uuid
AND epoch.history = 1234567
AND epoch.opens_at <= UTC_TIMESTAMP(6)
AND (epoch.floor < locks.fence OR epoch.since + INTERVAL ROUND(locks.ttl * 1000000) MICROSECOND <= UTC_TIMESTAMP(6))
AND (abs(epoch.floor) < locks.fence OR locks.owner IS NULL OR locks.expires_at + INTERVAL ROUND(2.5 * 1000000) MICROSECOND <= UTC_TIMESTAMP(6)));

-- leave_read: one empty row for each row that it changed
DELETE
FROM locks
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence;

-- leave_slot: one row with the number left by LAST_INSERT_ID(expr), if it changed something
UPDATE locks FORCE INDEX (PRIMARY)
SET owner = CASE WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND > GREATEST(UTC_TIMESTAMP(6), acquired_at) THEN '' END, expires_at = CASE WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND > GREATEST(UTC_TIMESTAMP(6), acquired_at) THEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND ELSE UTC_TIMESTAMP(6) END, count = 0
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND LAST_INSERT_ID(CASE WHEN acquired_at + INTERVAL ROUND(:min_hold * 1000000) MICROSECOND <= GREATEST(UTC_TIMESTAMP(6), acquired_at)
AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END) >= 0;

-- awaited: the rows it returns
SELECT CASE WHEN awaiting_fence = locks.fence
AND locks.owner IS NOT NULL THEN awaiting_channel END, fence
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key = :door;

-- next_keys: the rows it returns
SELECT max(lock_key) FROM (
SELECT lock_key
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key > :after ORDER BY lock_key LIMIT :most ) AS page;

-- list_keys: the rows it returns
SELECT lock_key, locks.owner, locks.fence, locks.count, locks.ttl, TIMESTAMPDIFF(MICROSECOND, locks.acquired_at, UTC_TIMESTAMP(6)) / 1e6, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), locks.expires_at) / 1e6, locks.label, locks.host, locks.pid, locks.thread, locks.program, locks.celery_task_id, revoked_fence, freed_fence, revocation, kind, reading, CASE WHEN locks.awaiting_fence = locks.fence THEN 1 ELSE 0 END, (SELECT count(*) FROM lock_waiters AS waiter
WHERE waiter.lock_key = locks.lock_key
AND waiter.ticket > locks.served_ticket
AND waiter.expires_at > UTC_TIMESTAMP(6))
FROM locks
WHERE lock_key > :after
AND lock_key <= :upto
AND (owner <> '' OR (owner IS NOT NULL
AND expires_at > UTC_TIMESTAMP(6)) OR last_ticket > served_ticket OR freed_fence = fence OR :free = 1) ORDER BY lock_key LIMIT :most;

-- count_waiters: the rows it returns
SELECT (SELECT count(*) FROM lock_waiters AS waiter
WHERE waiter.lock_key = locks.lock_key
AND waiter.ticket > locks.served_ticket
AND waiter.expires_at > UTC_TIMESTAMP(6))
FROM locks FORCE INDEX (PRIMARY)
WHERE lock_key = :key;

-- list_waiters: the rows it returns
SELECT waiter.ticket, TIMESTAMPDIFF(MICROSECOND, waiter.joined_at, UTC_TIMESTAMP(6)) / 1e6, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), waiter.expires_at) / 1e6, waiter.label, waiter.host, waiter.pid, waiter.thread, waiter.program, waiter.celery_task_id FROM lock_waiters AS waiter STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = waiter.lock_key
WHERE waiter.ticket + 0 > locks.served_ticket
AND waiter.expires_at > UTC_TIMESTAMP(6)
AND waiter.lock_key = :key ORDER BY waiter.ticket LIMIT :most;

-- list_all_waiters: the rows it returns
SELECT waiter.lock_key, waiter.ticket, TIMESTAMPDIFF(MICROSECOND, waiter.joined_at, UTC_TIMESTAMP(6)) / 1e6, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), waiter.expires_at) / 1e6, waiter.label, waiter.host, waiter.pid, waiter.thread, waiter.program, waiter.celery_task_id FROM lock_waiters AS waiter STRAIGHT_JOIN locks FORCE INDEX (PRIMARY)
ON locks.lock_key = waiter.lock_key
WHERE waiter.ticket + 0 > locks.served_ticket
AND waiter.expires_at > UTC_TIMESTAMP(6) ORDER BY waiter.joined_at, waiter.ticket LIMIT :most;

-- free: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET owner = NULL, expires_at = UTC_TIMESTAMP(6), count = 0, freed_fence = :fence, revocation = :words
WHERE lock_key = :key
AND fence = :fence
AND owner IS NOT NULL;

-- revoke: one empty row for each row that it changed
UPDATE locks FORCE INDEX (PRIMARY)
SET revoked_fence = :fence, revocation = :words
WHERE lock_key = :key
AND fence = :fence
AND owner <> ''
AND expires_at > UTC_TIMESTAMP(6);

-- note: one empty row for each row that it changed
INSERT INTO lock_events (lock_key, kind, fence, seconds, detail, label, host, pid, thread, program, celery_task_id, happened_at)
SELECT record.lock_key, record.kind, record.fence, record.seconds, record.detail, record.label, record.host, record.pid, record.thread, record.program, record.celery_task_id, UTC_TIMESTAMP(6) - INTERVAL ROUND(record.age * 1000000) MICROSECOND FROM JSON_TABLE(:events, '$[*]' COLUMNS (lock_key varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.lock_key', kind varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.kind', fence bigint PATH '$.fence', seconds double PATH '$.seconds', detail varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.detail', label varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.label', host varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.host', pid bigint PATH '$.pid', thread varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.thread', program varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.program', celery_task_id varchar(255) CHARACTER
SET utf8mb4 COLLATE utf8mb4_0900_bin PATH '$.celery_task_id', age double PATH '$.age')) AS record
WHERE record.age >= 0;

-- trim: one empty row for each row that it changed
DELETE lock_events FROM (SELECT LEAST((SELECT max(id) FROM lock_events) - :keep, (SELECT min(id) FROM lock_events) + 999) AS last) AS due STRAIGHT_JOIN lock_events FORCE INDEX (PRIMARY)
ON id <= due.last;

-- list_events: the rows it returns
SELECT lock_key, kind, fence, TIMESTAMPDIFF(MICROSECOND, happened_at, UTC_TIMESTAMP(6)) / 1e6, seconds, detail, label, host, pid, thread, program, celery_task_id FROM lock_events
WHERE lock_key = :key ORDER BY id DESC LIMIT :most;

-- list_all_events: the rows it returns
SELECT lock_key, kind, fence, TIMESTAMPDIFF(MICROSECOND, happened_at, UTC_TIMESTAMP(6)) / 1e6, seconds, detail, label, host, pid, thread, program, celery_task_id FROM lock_events ORDER BY id DESC LIMIT :most;
