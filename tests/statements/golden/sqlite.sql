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

-- take: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET owner = :owner, fence = max(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000), count = 1, reading = :reading, ttl = :ttl, acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)), label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND kind = :kind
AND (owner IS NULL OR expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now'))
AND (last_ticket = served_ticket OR :fair = 0)
RETURNING fence;

-- create: the rows it returns
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id, kind, reading)
VALUES (:key, :owner, CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000, 1, :ttl, strftime('%Y-%m-%d %H:%M:%f000', 'now'), strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)), :label, :host, :pid, :thread, :program, :task, :kind, :reading)
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence;

-- inspect: the rows it returns
SELECT owner, fence, count, ttl, round((julianday('now') - julianday(acquired_at)) * 86400.0, 3), round((julianday(expires_at) - julianday('now')) * 86400.0, 3), label, host, pid, thread, program, celery_task_id, revoked_fence, freed_fence, revocation, kind, reading, CASE WHEN locks.awaiting_fence = locks.fence THEN 1 ELSE 0 END
FROM locks
WHERE lock_key = :key;

-- set_count: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET count = :count, expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- extend: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET ttl = :ttl, expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life))
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- renew: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', due.life))) FROM (
SELECT json_extract(value, '$.key') AS name, json_extract(value, '$.owner') AS holder, json_extract(value, '$.fence') AS number, json_extract(value, '$.life') AS life, json_extract(value, '$.not_notified') AS not_notified FROM json_each(:leases) LIMIT -1 ) AS due
WHERE lock_key IN (SELECT due.name)
AND owner = due.holder
AND fence = due.number
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND (revoked_fence <> fence OR due.not_notified = 0);

-- alive: the rows it returns
SELECT lock_key, owner, fence, CASE WHEN revoked_fence = locks.fence THEN revocation END FROM (
SELECT json_extract(value, '$.key') AS name, json_extract(value, '$.owner') AS holder, json_extract(value, '$.fence') AS number, json_extract(value, '$.life') AS life, json_extract(value, '$.not_notified') AS not_notified FROM json_each(:leases) LIMIT -1 ) AS due CROSS JOIN locks INDEXED BY locks_pin
WHERE lock_key IN (SELECT due.name)
AND owner = due.holder
AND fence = due.number
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- detach: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET owner = :heir, count = 0, ttl = :life, expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key
AND owner IN (:owner, :heir)
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- attach: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET count = 1, ttl = CASE WHEN owner = :heir THEN max(ttl, :ttl) ELSE :ttl END, expires_at = CASE WHEN owner = :heir THEN max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life))) ELSE strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)) END, owner = :heir, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND owner IN (:owner, :heir)
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- release: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET owner = CASE WHEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold)) > max(strftime('%Y-%m-%d %H:%M:%f000', 'now'), acquired_at) THEN '' END, expires_at = CASE WHEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold)) > max(strftime('%Y-%m-%d %H:%M:%f000', 'now'), acquired_at) THEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold)) ELSE strftime('%Y-%m-%d %H:%M:%f000', 'now') END, count = 0
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
RETURNING CASE WHEN expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END;

-- pin: the rows it returns
UPDATE locks
SET expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key
AND fence = :fence
AND owner <> ''
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
RETURNING 1;

-- stale: the rows it returns
SELECT lock_key, CASE WHEN expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention))
AND (kind = 0 OR NOT EXISTS (SELECT 1
FROM locks AS share INDEXED BY locks_pin
WHERE share.lock_key > locks.lock_key || char(31)
AND share.lock_key < locks.lock_key || ' '
AND share.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))) THEN 1 ELSE 0 END
FROM locks INDEXED BY locks_pin
WHERE lock_key > :after ORDER BY lock_key LIMIT 100;

-- reap: one empty row for each row that it changed
DELETE
FROM locks INDEXED BY locks_pin
WHERE lock_key IN (SELECT value FROM json_each(:names))
AND expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention))
AND fence < CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000
AND (last_ticket <= served_ticket OR last_ticket < CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000 - 10000000)
AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter INDEXED BY lock_waiters_queue
WHERE waiter.lock_key IN (SELECT locks.lock_key)
AND waiter.ticket > served_ticket
AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'));

-- join: the rows it returns
INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel, reading, joined_at, expires_at)
SELECT :owner, lock_key, max(last_ticket + 1, CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000, (SELECT coalesce(max(ticket) + 1, 0) FROM lock_waiters
WHERE lock_waiters.lock_key = :key)), :ttl, :label, :host, :pid, :thread, :program, :task, :channel, :reading, strftime('%Y-%m-%d %H:%M:%f000', 'now'), strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :waiter_ttl))
FROM locks
WHERE lock_key = :key
AND kind = :kind
RETURNING ticket;

-- announce: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET last_ticket = max(last_ticket, :ticket)
WHERE lock_key = :key
AND served_ticket < :ticket
RETURNING CASE WHEN owner >= '' THEN max(round((julianday(expires_at) - julianday('now')) * 86400.0, 3), 0) * 1000 ELSE 0 END;

-- queue_status: the rows it returns
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END, CASE WHEN locks.owner IS NULL THEN min(round((julianday(locks.expires_at) - julianday('now')) * 86400.0, 3), 0) ELSE round((julianday(locks.expires_at) - julianday('now')) * 86400.0, 3) END, served_ticket + 1, last_ticket, (SELECT CASE WHEN count(*) = 16
AND count(alive) = 0 THEN 1 ELSE count(alive) END FROM (
SELECT CASE WHEN other.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now') THEN 1 END AS alive FROM lock_waiters AS other INDEXED BY lock_waiters_queue
WHERE other.lock_key = :key
AND other.ticket < :ticket
AND other.ticket > (SELECT served_ticket
FROM locks AS theirs
WHERE theirs.lock_key = :key) ORDER BY other.ticket DESC LIMIT 16) AS nearest), (SELECT count(*) FROM lock_waiters AS me
WHERE me.owner = :owner
AND me.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))
FROM locks
WHERE locks.lock_key = :key;

-- grant: the rows it returns
UPDATE locks
SET owner = next.owner, fence = max(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000), count = 1, reading = next.reading, ttl = next.ttl, acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), expires_at = min(next.expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', next.ttl))), label = next.label, host = next.host, pid = next.pid, thread = next.thread, program = next.program, celery_task_id = next.celery_task_id, last_ticket = max(last_ticket, next.ticket), served_ticket = next.ticket FROM (
SELECT * FROM lock_waiters
WHERE lock_key = :key
AND ticket >= :first
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now') ORDER BY ticket LIMIT 1 ) AS next
WHERE locks.lock_key = :key
AND served_ticket < next.ticket
AND (locks.owner IS NULL OR locks.expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now') OR (locks.owner = :owner
AND locks.fence = :fence))
RETURNING served_ticket, (SELECT channel FROM lock_waiters
WHERE lock_waiters.owner = locks.owner), owner, fence, 0, NULL;

-- accept: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key
AND owner = :owner
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
RETURNING fence;

-- adopt_place: one empty row for each row that it changed
UPDATE lock_waiters
SET owner = :heir, ttl = :ttl, label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task, reading = :reading, channel = :channel
WHERE owner = :owner
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND ticket > (SELECT served_ticket
FROM locks
WHERE locks.lock_key = lock_waiters.lock_key);

-- hand_over_local: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET owner = :heir, fence = max(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000), count = 1, reading = :reading, ttl = :ttl, acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)), label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND kind = :kind
AND (owner = :owner
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))
AND (last_ticket = served_ticket OR :handovers_left > 0)
RETURNING fence;

-- leave_queue: one empty row for each row that it changed
DELETE FROM lock_waiters INDEXED BY sqlite_autoindex_lock_waiters_1
WHERE owner IN (SELECT value FROM json_each(:owners));

-- first_waiter: the rows it returns
SELECT ticket, channel, owner FROM lock_waiters INDEXED BY lock_waiters_queue
WHERE lock_key = :key
AND ticket >= :first
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now') ORDER BY ticket LIMIT 1;

-- heartbeat: the rows it returns
UPDATE lock_waiters INDEXED BY sqlite_autoindex_lock_waiters_1
SET expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :waiter_ttl)))
WHERE owner IN (SELECT value FROM json_each(:owners))
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND ticket > (SELECT served_ticket
FROM locks
WHERE locks.lock_key = lock_waiters.lock_key)
RETURNING owner;

-- chain: the rows it returns
WITH RECURSIVE linked (owner, lock_key, ticket, host, pid, thread, holder, circle) AS (
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread, held.owner, waiter.circle FROM lock_waiters AS waiter CROSS JOIN locks AS held INDEXED BY locks_pin
ON held.lock_key IN (SELECT waiter.lock_key)
WHERE waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND held.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND waiter.ticket + 0 > held.served_ticket
AND held.owner IS NOT NULL
AND held.owner <> waiter.owner
AND held.count > 0
AND waiter.owner = :owner UNION
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread, held.owner, waiter.circle FROM linked CROSS JOIN lock_waiters AS waiter INDEXED BY sqlite_autoindex_lock_waiters_1
ON waiter.owner >= substr(linked.holder, 1, 24)
AND waiter.owner < substr(linked.holder, 1, 24) || 'g' CROSS JOIN locks AS held INDEXED BY locks_pin
ON held.lock_key IN (SELECT waiter.lock_key)
WHERE waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND held.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND waiter.ticket + 0 > held.served_ticket
AND held.owner IS NOT NULL
AND held.owner <> waiter.owner
AND held.count > 0 )
SELECT owner, lock_key, ticket, host, pid, thread, holder, circle FROM linked;

-- confirm: one empty row for each row that it changed
UPDATE lock_waiters INDEXED BY sqlite_autoindex_lock_waiters_1
SET circle = :circle
WHERE owner = :owner
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- clear: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET served_ticket = last_ticket
WHERE lock_key = :key
AND last_ticket = :last
AND served_ticket < last_ticket
AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
WHERE other.lock_key = :key
AND other.ticket > served_ticket
AND other.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'));

-- dead: the rows it returns
SELECT owner, CASE WHEN expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention)) THEN 1 ELSE 0 END FROM lock_waiters INDEXED BY sqlite_autoindex_lock_waiters_1
WHERE owner > :after ORDER BY owner LIMIT 100;

-- forget: one empty row for each row that it changed
DELETE FROM lock_waiters INDEXED BY sqlite_autoindex_lock_waiters_1
WHERE owner IN (SELECT value FROM json_each(:names))
AND expires_at < strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', :retention));

-- read: the rows it returns
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id, kind, reading)
SELECT :key, :owner, door.fence + 1, 1, :ttl, strftime('%Y-%m-%d %H:%M:%f000', 'now'), strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)), :label, :host, :pid, :thread, :program, :task, :kind, 1
FROM locks AS door INDEXED BY locks_pin
WHERE door.lock_key = :door
AND door.kind = :kind
AND ((:holder = ''
AND (door.reading = 1 OR door.owner IS NULL OR door.expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now'))) OR (door.owner = :holder
AND door.fence = :holders_fence
AND door.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')))
AND (:admitted = 1 OR door.last_ticket = door.served_ticket OR NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter INDEXED BY lock_waiters_queue
WHERE waiter.lock_key = :door
AND waiter.ticket > door.served_ticket
AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND waiter.reading = 0))
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence;

-- take_slot: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET owner = :owner, fence = max(fence + CASE kind WHEN 1 THEN 2 ELSE 1 END, CAST(strftime('%s', 'now') AS integer) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS integer) * 1000), count = 1, reading = :reading, ttl = :ttl, acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)), label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND kind = :kind
AND (owner IS NULL OR expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now'))
AND EXISTS (SELECT 1 FROM (
SELECT door.lock_key
FROM locks AS door INDEXED BY locks_pin
WHERE door.lock_key = :door
AND door.kind = :kind
AND (door.last_ticket = door.served_ticket OR :fair = 0)
AND (door.owner IS NULL OR door.expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now')) LIMIT 1 ) AS seen)
RETURNING fence;

-- alone: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET awaiting_fence = -fence, acquired_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life)))
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND NOT EXISTS (SELECT 1 FROM (
SELECT share.lock_key
FROM locks AS share INDEXED BY locks_pin
WHERE share.lock_key > :low
AND share.lock_key < :high LIMIT 1) AS seen);

-- await_leaving: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET awaiting_fence = fence, awaiting_channel = :channel, expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('+%.3f seconds', :life))
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND awaiting_fence <> -fence;

-- listed: the rows it returns
SELECT lock_key, owner, fence, CASE WHEN owner IS NULL THEN min(round((julianday(expires_at) - julianday('now')) * 86400.0, 3), 0) ELSE round((julianday(expires_at) - julianday('now')) * 86400.0, 3) END
FROM locks INDEXED BY locks_pin
WHERE lock_key > :low
AND lock_key < :high ORDER BY lock_key LIMIT :most;

-- end_expired: one empty row for each row that it changed
DELETE
FROM locks INDEXED BY locks_pin
WHERE lock_key IN (SELECT value FROM json_each(:names))
AND (owner IS NULL OR expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now'));

-- leave_read: one empty row for each row that it changed
DELETE
FROM locks
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence;

-- leave_slot: the rows it returns
UPDATE locks INDEXED BY locks_pin
SET owner = CASE WHEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold)) > max(strftime('%Y-%m-%d %H:%M:%f000', 'now'), acquired_at) THEN '' END, expires_at = CASE WHEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold)) > max(strftime('%Y-%m-%d %H:%M:%f000', 'now'), acquired_at) THEN strftime('%Y-%m-%d %H:%M:%f000', acquired_at, printf('+%.3f seconds', :min_hold)) ELSE strftime('%Y-%m-%d %H:%M:%f000', 'now') END, count = 0
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
RETURNING CASE WHEN expires_at <= strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END;

-- awaited: the rows it returns
SELECT CASE WHEN awaiting_fence = locks.fence
AND locks.owner IS NOT NULL THEN awaiting_channel END, fence
FROM locks INDEXED BY locks_pin
WHERE lock_key = :door;

-- next_keys: the rows it returns
SELECT max(lock_key) FROM (
SELECT lock_key
FROM locks INDEXED BY locks_pin
WHERE lock_key > :after ORDER BY lock_key LIMIT :most ) AS page;

-- list_keys: the rows it returns
SELECT lock_key, locks.owner, locks.fence, locks.count, locks.ttl, round((julianday('now') - julianday(locks.acquired_at)) * 86400.0, 3), round((julianday(locks.expires_at) - julianday('now')) * 86400.0, 3), locks.label, locks.host, locks.pid, locks.thread, locks.program, locks.celery_task_id, revoked_fence, freed_fence, revocation, kind, reading, CASE WHEN locks.awaiting_fence = locks.fence THEN 1 ELSE 0 END, (SELECT count(*) FROM lock_waiters AS waiter
WHERE waiter.lock_key = locks.lock_key
AND waiter.ticket > locks.served_ticket
AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))
FROM locks
WHERE lock_key > :after
AND lock_key <= :upto
AND (owner <> '' OR (owner IS NOT NULL
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')) OR last_ticket > served_ticket OR freed_fence = fence OR :free = 1) ORDER BY lock_key LIMIT :most;

-- count_waiters: the rows it returns
SELECT (SELECT count(*) FROM lock_waiters AS waiter
WHERE waiter.lock_key = locks.lock_key
AND waiter.ticket > locks.served_ticket
AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now'))
FROM locks INDEXED BY locks_pin
WHERE lock_key = :key;

-- list_waiters: the rows it returns
SELECT waiter.ticket, round((julianday('now') - julianday(waiter.joined_at)) * 86400.0, 3), round((julianday(waiter.expires_at) - julianday('now')) * 86400.0, 3), waiter.label, waiter.host, waiter.pid, waiter.thread, waiter.program, waiter.celery_task_id FROM lock_waiters AS waiter CROSS JOIN locks INDEXED BY locks_pin
ON locks.lock_key IN (SELECT waiter.lock_key)
WHERE waiter.ticket + 0 > locks.served_ticket
AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now')
AND waiter.lock_key = :key ORDER BY waiter.ticket LIMIT :most;

-- list_all_waiters: the rows it returns
SELECT waiter.lock_key, waiter.ticket, round((julianday('now') - julianday(waiter.joined_at)) * 86400.0, 3), round((julianday(waiter.expires_at) - julianday('now')) * 86400.0, 3), waiter.label, waiter.host, waiter.pid, waiter.thread, waiter.program, waiter.celery_task_id FROM lock_waiters AS waiter CROSS JOIN locks INDEXED BY locks_pin
ON locks.lock_key IN (SELECT waiter.lock_key)
WHERE waiter.ticket + 0 > locks.served_ticket
AND waiter.expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now') ORDER BY waiter.joined_at, waiter.ticket LIMIT :most;

-- free: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET owner = NULL, expires_at = strftime('%Y-%m-%d %H:%M:%f000', 'now'), count = 0, freed_fence = :fence, revocation = :words
WHERE lock_key = :key
AND fence = :fence
AND owner IS NOT NULL;

-- revoke: one empty row for each row that it changed
UPDATE locks INDEXED BY locks_pin
SET revoked_fence = :fence, revocation = :words
WHERE lock_key = :key
AND fence = :fence
AND owner <> ''
AND expires_at > strftime('%Y-%m-%d %H:%M:%f000', 'now');

-- note: one empty row for each row that it changed
INSERT INTO lock_events (lock_key, kind, fence, seconds, detail, label, host, pid, thread, program, celery_task_id, happened_at)
SELECT record.lock_key, record.kind, record.fence, record.seconds, record.detail, record.label, record.host, record.pid, record.thread, record.program, record.celery_task_id, strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('-%.3f seconds', record.age)) FROM (SELECT json_extract(value, '$.lock_key') AS lock_key, json_extract(value, '$.kind') AS kind, json_extract(value, '$.fence') AS fence, json_extract(value, '$.seconds') AS seconds, json_extract(value, '$.detail') AS detail, json_extract(value, '$.label') AS label, json_extract(value, '$.host') AS host, json_extract(value, '$.pid') AS pid, json_extract(value, '$.thread') AS thread, json_extract(value, '$.program') AS program, json_extract(value, '$.celery_task_id') AS celery_task_id, json_extract(value, '$.age') AS age FROM json_each(:events)) AS record
WHERE record.age >= 0;

-- trim: one empty row for each row that it changed
DELETE FROM lock_events
WHERE id <= (SELECT last FROM (SELECT min((SELECT max(id) FROM lock_events) - :keep, (SELECT min(id) FROM lock_events) + 999) AS last) AS due);

-- list_events: the rows it returns
SELECT lock_key, kind, fence, round((julianday('now') - julianday(happened_at)) * 86400.0, 3), seconds, detail, label, host, pid, thread, program, celery_task_id FROM lock_events
WHERE lock_key = :key ORDER BY id DESC LIMIT :most;

-- list_all_events: the rows it returns
SELECT lock_key, kind, fence, round((julianday('now') - julianday(happened_at)) * 86400.0, 3), seconds, detail, label, host, pid, thread, program, celery_task_id FROM lock_events ORDER BY id DESC LIMIT :most;
