CREATE TABLE locks (
    lock_key varchar(255) COLLATE "C" NOT NULL PRIMARY KEY,
    owner varchar(64) COLLATE "C",
    fence bigint NOT NULL,
    count integer NOT NULL,
    ttl double precision NOT NULL,
    acquired_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    label varchar(255) COLLATE "C" NOT NULL,
    host varchar(255) COLLATE "C" NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) COLLATE "C" NOT NULL,
    program varchar(255) COLLATE "C" NOT NULL,
    celery_task_id varchar(255) COLLATE "C" NOT NULL,
    last_ticket bigint DEFAULT 0 NOT NULL,
    served_ticket bigint DEFAULT 0 NOT NULL,
    revoked_fence bigint DEFAULT 0 NOT NULL,
    freed_fence bigint DEFAULT 0 NOT NULL,
    revocation varchar(255) COLLATE "C" DEFAULT '' NOT NULL
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX locks_pin ON locks (lock_key);
CREATE TABLE lock_waiters (
    owner varchar(64) COLLATE "C" NOT NULL PRIMARY KEY,
    lock_key varchar(255) COLLATE "C" NOT NULL,
    ticket bigint NOT NULL,
    ttl double precision NOT NULL,
    label varchar(255) COLLATE "C" NOT NULL,
    host varchar(255) COLLATE "C" NOT NULL,
    pid integer NOT NULL,
    thread varchar(255) COLLATE "C" NOT NULL,
    program varchar(255) COLLATE "C" NOT NULL,
    celery_task_id varchar(255) COLLATE "C" NOT NULL,
    channel varchar(63) COLLATE "C" NOT NULL,
    joined_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX lock_waiters_queue ON lock_waiters (lock_key, ticket);

-- take: the rows it returns
UPDATE locks
SET owner = :owner, fence = greatest(fence + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)), count = 1, ttl = :ttl, acquired_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => :life), label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND CASE WHEN owner IS NULL OR expires_at <= clock_timestamp() THEN pg_try_advisory_xact_lock(hashtextextended(lock_key, CAST(CAST('locks' AS regclass) AS bigint))) ELSE false END
AND (last_ticket = served_ticket OR CAST(:fair AS integer) = 0)
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING fence;

-- create: the rows it returns
INSERT INTO locks (lock_key, owner, fence, count, ttl, acquired_at, expires_at, label, host, pid, thread, program, celery_task_id)
SELECT CAST(:key AS text), :owner, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), 1, :ttl, clock_timestamp(), clock_timestamp() + make_interval(secs => :life), :label, :host, CAST(:pid AS integer), :thread, :program, :task
WHERE pg_try_advisory_xact_lock(hashtextextended(CAST(:key AS text) COLLATE "C", CAST(CAST('locks' AS regclass) AS bigint)))
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
ON CONFLICT (lock_key) DO NOTHING
RETURNING fence;

-- inspect: the rows it returns
SELECT owner, fence, count, ttl, CAST(extract(epoch FROM clock_timestamp() - acquired_at) AS double precision), CAST(extract(epoch FROM expires_at - clock_timestamp()) AS double precision), label, host, pid, thread, program, celery_task_id, revoked_fence, freed_fence, revocation
FROM locks
WHERE lock_key = :key;

-- reenter: one empty row for each row that it changed
UPDATE locks
SET count = CAST(:count AS integer) + 1, expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life))
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);

-- extend: one empty row for each row that it changed
UPDATE locks
SET ttl = :ttl, expires_at = clock_timestamp() + make_interval(secs => :life)
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);

-- renew: one empty row for each row that it changed
UPDATE locks
SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => due.life)) FROM json_to_recordset(CAST(:leases AS json)) AS due (key text, owner text, fence bigint, life double precision, unaware integer)
WHERE lock_key = due.key
AND locks.owner = due.owner
AND locks.fence = due.fence
AND expires_at > clock_timestamp()
AND (revoked_fence <> locks.fence OR unaware = 0)
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);

-- alive: the rows it returns
SELECT lock_key, locks.owner, locks.fence, CASE WHEN revoked_fence = locks.fence THEN revocation END FROM json_to_recordset(CAST(:leases AS json)) AS due (key text, owner text, fence bigint, life double precision, unaware integer) JOIN locks
ON lock_key = due.key
AND locks.owner = due.owner
AND locks.fence = due.fence
WHERE expires_at > clock_timestamp();

-- attach: the rows it returns
UPDATE locks
SET count = count + 1, expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life)), host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING count;

-- adopt: one empty row for each row that it changed
UPDATE locks
SET count = 1, ttl = :ttl, expires_at = clock_timestamp() + make_interval(secs => :life), host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > clock_timestamp()
AND count = 0
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);

-- detach: one empty row for each row that it changed
UPDATE locks
SET count = CASE WHEN CAST(:count AS integer) > 0 THEN CAST(:count AS integer) ELSE count END - 1, expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life))
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND expires_at > clock_timestamp()
AND (CAST(:count AS integer) = 0 OR (count <= CAST(:count AS integer)
AND host = :host
AND pid = :pid
AND thread = :thread))
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);

-- release: the rows it returns
UPDATE locks
SET owner = CASE WHEN CAST(:count AS integer) > 1 THEN owner END, expires_at = CASE WHEN CAST(:count AS integer) > 1 THEN expires_at ELSE clock_timestamp() END, count = CAST(:count AS integer) - 1
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING CASE WHEN count = 0
AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END;

-- leave: the rows it returns
UPDATE locks
SET owner = CASE WHEN count > 1 THEN owner WHEN acquired_at + make_interval(secs => :min_hold) > clock_timestamp() THEN '' END, expires_at = CASE WHEN count > 1 THEN expires_at ELSE greatest(clock_timestamp(), acquired_at + make_interval(secs => :min_hold)) END, count = greatest(count - 1, 0)
WHERE lock_key = :key
AND owner = :owner
AND fence = :fence
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING CASE WHEN expires_at <= clock_timestamp()
AND last_ticket > served_ticket THEN served_ticket + 1 ELSE 0 END;

-- pin: the rows it returns
SELECT EXISTS (SELECT 1
FROM locks
WHERE lock_key = :key
AND fence = :fence) FROM pg_advisory_xact_lock_shared(hashtextextended(CAST(:key AS text) COLLATE "C", CAST(CAST('locks' AS regclass) AS bigint)));

-- locate: the rows it returns
SELECT nspname, 0 FROM pg_class JOIN pg_namespace
ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = CAST('locks' AS regclass);

-- stale: the rows it returns
SELECT lock_key, CASE WHEN expires_at < clock_timestamp() - make_interval(secs => :retention) THEN 1 ELSE 0 END
FROM locks
WHERE lock_key > :after ORDER BY lock_key LIMIT 1000;

-- reap: one empty row for each row that it changed
DELETE
FROM locks
WHERE lock_key = :key
AND expires_at < clock_timestamp() - make_interval(secs => :retention)
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL
AND NOT EXISTS (SELECT 1 FROM lock_waiters AS waiter
WHERE waiter.lock_key = :key
AND waiter.ticket > served_ticket
AND waiter.expires_at > clock_timestamp());

-- join: the rows it returns
WITH announced AS (
UPDATE locks
SET last_ticket = greatest(last_ticket + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint))
WHERE lock_key = :key
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING last_ticket, served_ticket, CASE WHEN owner IS NULL THEN least(expires_at, clock_timestamp()) ELSE expires_at END AS held_until ), joined AS (
INSERT INTO lock_waiters (owner, lock_key, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel, joined_at, expires_at)
SELECT :owner, :key, last_ticket, :ttl, :label, :host, CAST(:pid AS integer), :thread, :program, :task, :channel, clock_timestamp(), clock_timestamp() + make_interval(secs => :waiter_ttl) FROM announced
RETURNING ticket )
SELECT ticket, CAST(extract(epoch FROM held_until - clock_timestamp()) AS double precision), served_ticket + 1, (SELECT count(*) FROM (
SELECT 1 FROM lock_waiters AS other
WHERE other.lock_key = :key
AND other.ticket > served_ticket
AND other.expires_at > clock_timestamp() LIMIT 16) AS before) FROM joined, announced;

-- announce: one empty row for each row that it changed
UPDATE locks
SET last_ticket = greatest(last_ticket, CAST(:ticket AS bigint))
WHERE lock_key = :key
AND served_ticket < CAST(:ticket AS bigint)
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL;

-- queue_status: the rows it returns
SELECT CASE WHEN locks.owner = :owner THEN 1 ELSE 0 END, CASE WHEN locks.owner IS NULL THEN least(CAST(extract(epoch
FROM locks.expires_at - clock_timestamp()) AS double precision), 0) ELSE CAST(extract(epoch
FROM locks.expires_at - clock_timestamp()) AS double precision) END, served_ticket + 1, last_ticket, (SELECT count(*) FROM (
SELECT 1 FROM lock_waiters AS other JOIN locks AS theirs
ON theirs.lock_key = other.lock_key
WHERE other.lock_key = :key
AND other.ticket > theirs.served_ticket
AND other.ticket < CAST(:ticket AS bigint)
AND other.expires_at > clock_timestamp() LIMIT 16) AS earlier), (SELECT count(*) FROM lock_waiters AS me
WHERE me.owner = :owner
AND me.expires_at > clock_timestamp())
FROM locks
WHERE locks.lock_key = :key;

-- grant: the rows it returns
WITH next AS MATERIALIZED (
SELECT owner, ticket, ttl, label, host, pid, thread, program, celery_task_id, channel, expires_at FROM lock_waiters
WHERE lock_key = :key
AND ticket >= CAST(:first AS bigint)
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL ORDER BY ticket LIMIT 1 FOR UPDATE ), granted AS (
UPDATE locks
SET owner = next.owner, fence = greatest(locks.fence + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)), count = 1, ttl = next.ttl, acquired_at = clock_timestamp(), expires_at = least(next.expires_at, clock_timestamp() + make_interval(secs => next.ttl)), label = next.label, host = next.host, pid = next.pid, thread = next.thread, program = next.program, celery_task_id = next.celery_task_id, last_ticket = greatest(last_ticket, next.ticket), served_ticket = next.ticket FROM next
WHERE locks.lock_key = :key
AND served_ticket < next.ticket
AND CASE WHEN locks.owner IS NULL OR locks.expires_at <= clock_timestamp() OR (locks.owner = :owner
AND locks.fence = CAST(:fence AS bigint)) THEN pg_try_advisory_xact_lock(hashtextextended(lock_key, CAST(CAST('locks' AS regclass) AS bigint))) ELSE false END
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING next.ticket, next.channel, next.owner, locks.fence ), gone AS ( DELETE FROM lock_waiters USING granted
WHERE lock_key = :key
AND lock_waiters.ticket = granted.ticket )
SELECT ticket, channel, owner, fence, CASE WHEN channel <> ''
AND left(channel, length(:here)) <> :here THEN CAST(pg_notify(split_part(channel, '.', 1), concat_ws(' ', ticket, fence, encode(sha256(convert_to(concat_ws(' ', ticket, fence, owner), 'UTF8')), 'hex'), :key)) AS text) END FROM granted;

-- accept: the rows it returns
UPDATE locks
SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :life))
WHERE lock_key = :key
AND owner = :owner
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING fence;

-- inherit: one empty row for each row that it changed
UPDATE lock_waiters
SET owner = :heir, ttl = :ttl, label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task, channel = :channel
WHERE owner = :owner
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL;

-- hand_over_local: the rows it returns
UPDATE locks
SET owner = :heir, fence = greatest(fence + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)), ttl = :ttl, acquired_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => :life), label = :label, host = :host, pid = :pid, thread = :thread, program = :program, celery_task_id = :task
WHERE lock_key = :key
AND CASE WHEN owner = :owner
AND fence = CAST(:fence AS bigint)
AND count = 1
AND expires_at > clock_timestamp() THEN pg_try_advisory_xact_lock(hashtextextended(lock_key, CAST(CAST('locks' AS regclass) AS bigint))) ELSE false END
AND (last_ticket = served_ticket OR CAST(:handovers_left AS integer) > 0)
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING fence;

-- leave_queue: one empty row for each row that it changed
DELETE FROM lock_waiters USING json_array_elements_text(CAST(:owners AS json)) AS due (holder)
WHERE owner = due.holder
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL;

-- first_waiter: the rows it returns
SELECT ticket, channel, owner FROM lock_waiters
WHERE lock_key = :key
AND ticket >= CAST(:first AS bigint)
AND expires_at > clock_timestamp() ORDER BY ticket LIMIT 1;

-- call: the rows it returns
SELECT CAST(pg_notify(:channel, CAST(:message AS text)) AS text);

-- heartbeat: the rows it returns
UPDATE lock_waiters
SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :waiter_ttl)) FROM json_array_elements_text(CAST(:owners AS json)) AS due (holder)
WHERE owner = due.holder
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL)
RETURNING owner;

-- waits: the rows it returns
SELECT waiter.owner, waiter.lock_key, waiter.ticket, waiter.host, waiter.pid, waiter.thread, held.owner, held.host, held.pid, held.thread FROM lock_waiters AS waiter JOIN locks AS held
ON held.lock_key = waiter.lock_key
WHERE waiter.expires_at > clock_timestamp()
AND held.expires_at > clock_timestamp()
AND waiter.ticket > held.served_ticket
AND held.owner IS NOT NULL
AND held.owner <> waiter.owner
AND held.count > 0;

-- clear: one empty row for each row that it changed
UPDATE locks
SET served_ticket = last_ticket
WHERE lock_key = :key
AND last_ticket = CAST(:last AS bigint)
AND served_ticket < last_ticket
AND NOT EXISTS (SELECT 1 FROM lock_waiters AS other
WHERE other.lock_key = :key
AND other.ticket > served_ticket
AND other.expires_at > clock_timestamp())
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL;

-- dead: the rows it returns
SELECT owner, CASE WHEN expires_at < clock_timestamp() - make_interval(secs => :retention) THEN 1 ELSE 0 END FROM lock_waiters
WHERE owner > :after ORDER BY owner LIMIT 1000;

-- forget: one empty row for each row that it changed
DELETE FROM lock_waiters
WHERE owner = :owner
AND expires_at < clock_timestamp() - make_interval(secs => :retention)
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND set_config('synchronous_commit', 'off', true) IS NOT NULL;

-- list_keys: the rows it returns
SELECT lock_key, locks.owner, locks.fence, locks.count, locks.ttl, CAST(extract(epoch FROM clock_timestamp() - locks.acquired_at) AS double precision), CAST(extract(epoch
FROM locks.expires_at - clock_timestamp()) AS double precision), locks.label, locks.host, locks.pid, locks.thread, locks.program, locks.celery_task_id, revoked_fence, freed_fence, revocation, (SELECT count(*) FROM lock_waiters AS waiter
WHERE waiter.lock_key = locks.lock_key
AND waiter.ticket > locks.served_ticket
AND waiter.expires_at > clock_timestamp())
FROM locks
WHERE lock_key > :after
AND (owner IS NOT NULL OR CAST(:free AS integer) = 1) ORDER BY lock_key LIMIT CAST(:most AS integer);

-- list_waiters: the rows it returns
SELECT waiter.ticket, CAST(extract(epoch FROM clock_timestamp() - waiter.joined_at) AS double precision), CAST(extract(epoch FROM waiter.expires_at - clock_timestamp()) AS double precision), waiter.label, waiter.host, waiter.pid, waiter.thread, waiter.program, waiter.celery_task_id FROM lock_waiters AS waiter JOIN locks
ON locks.lock_key = waiter.lock_key
WHERE waiter.ticket > locks.served_ticket
AND waiter.expires_at > clock_timestamp()
AND waiter.lock_key = :key ORDER BY ticket;

-- list_all_waiters: the rows it returns
SELECT waiter.lock_key, waiter.ticket, CAST(extract(epoch FROM clock_timestamp() - waiter.joined_at) AS double precision), CAST(extract(epoch FROM waiter.expires_at - clock_timestamp()) AS double precision), waiter.label, waiter.host, waiter.pid, waiter.thread, waiter.program, waiter.celery_task_id FROM lock_waiters AS waiter JOIN locks
ON locks.lock_key = waiter.lock_key
WHERE waiter.ticket > locks.served_ticket
AND waiter.expires_at > clock_timestamp() ORDER BY waiter.joined_at, waiter.ticket LIMIT CAST(:most AS integer);

-- free: one empty row for each row that it changed
UPDATE locks
SET owner = NULL, expires_at = clock_timestamp(), count = 0, freed_fence = :fence, revocation = :words
WHERE lock_key = :key
AND fence = :fence
AND owner IS NOT NULL
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);

-- revoke: one empty row for each row that it changed
UPDATE locks
SET revoked_fence = :fence, revocation = :words
WHERE lock_key = :key
AND fence = :fence
AND owner <> ''
AND expires_at > clock_timestamp()
AND set_config('lock_timeout', '20ms', true) IS NOT NULL
AND (current_setting('synchronous_commit') <> 'off' OR set_config('synchronous_commit', 'on', true) IS NOT NULL);
