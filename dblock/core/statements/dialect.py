"""All statements of one database: what each does and answers, and how it is sent.

`common`, `shares` and `epoch` have the text of those that databases have in common, and say why each is safe. A
database's module has a subclass with its vocabulary, and the text of the few that truly differ.

Rule: the text is put together from constants when the module is imported, and never again.
"""

from __future__ import annotations

from copy import copy

from dblock.core.statements import common, shares
from dblock.core.statements.base import Failure, Reply, Statement, Tables, WhenLocked
from dblock.core.statements.epoch import Epochs, epochs
from dblock.core.statements.vocabulary import Vocabulary

_ROWS, _COUNT, _SKIP, _RAISE = Reply.ROWS, Reply.COUNT, WhenLocked.SKIP, WhenLocked.RAISE


class Dialect:
    """The statements and properties of one database; below each statement: its effect -> the columns of its answer."""

    name: str
    words: Vocabulary
    quote = '"'
    """The quotation mark of names."""
    tables = Tables()
    tick = 0.0
    """Seconds after which two readings of the database's clock surely differ; 0.0 if any two statements' do."""
    single_writer = False
    """Whether only one transaction at a time can write to the whole database."""
    pins_prepared = True
    """Whether `pin` lasts until a two-phase transaction ends, also if it is prepared and the server restarts."""
    pins_gaps = False
    """Whether the pin of a row may keep others from inserting the row before it."""
    join_answers = False
    """Whether `join` also announces the ticket, and answers whether the key is held."""
    grant_answers = False
    """Whether `grant` chooses the heir itself, and answers which waiter to notify."""
    grant_leaves = False
    """Whether `grant` also deletes the heir's place; else that stays, and no longer counts."""

    CREATE = RENEW = ALIVE = PIN = JOIN = GRANT = LEAVE_QUEUE = HEARTBEAT = READ = ""
    """The text of the statements that each database writes itself."""
    LOCATE = CALL = SLEEP_UNTIL_KILLED = UNLOGGED = LISTEN = ""
    """The text of those that some databases do not need."""
    HAND_OVER_LOCAL = LEAVE_READ = LEAVE_SLOT = ""
    """The text of those for which some databases have a better one than the common."""

    @staticmethod
    def classify(error: BaseException) -> Failure:
        """The meaning of a driver's error."""
        raise NotImplementedError

    def __init__(self) -> None:
        self.epoch = epochs(self.words) if self.words.server else None
        """The statements on the epoch; None if databases of this kind have no replicas."""
        self._write_those_of_keys(self.words)
        self._write_those_of_waiters(self.words)
        self._write_those_of_shares(self.words)

    def _write_those_of_keys(self, words: Vocabulary) -> None:
        numbers = words.numbers
        self.take = Statement("take", common.take(words), numbers, row_locked=_SKIP, database_locked=_RAISE)
        """Begin a tenure on a row that is free or expired -> fence."""
        self.create = Statement("create", self.CREATE, numbers, row_locked=_SKIP)
        """Begin the first tenure of a key that has no row -> fence."""
        self.inspect = Statement("inspect", common.inspect(words), _ROWS, owners=(0,))
        """Read a key's row: owner, fence, count, ttl, age, remaining, label, host, pid, thread, program, task,
        revoked_fence, freed_fence, revocation, kind, reading, awaiting."""
        self.set_count = Statement("set_count", common.set_count(words), _COUNT, critical=True)
        """Set the number of entries of a live tenure, and let its lease last at least one `life` more."""
        self.extend = Statement("extend", common.extend(words), _COUNT, critical=True)
        """Set the lease of a live tenure to end one life from now."""
        self.renew = Statement("renew", self.RENEW, _COUNT, critical=True, row_locked=_RAISE)
        """Let the leases of many live tenures last at least one life more -> one row for each. A tenure that was asked
        back is left out if its holder is `not_notified` of that."""
        self.alive = Statement("alive", self.ALIVE, _ROWS, critical=True, owners=(1,))
        """Those of many tenures that are alive -> key, owner, fence, revocation (null if it was not asked back)."""
        self.detach = Statement("detach", common.detach(words), _COUNT, critical=True)
        """Give a live tenure, which no flow holds from then on, the owner `heir`, the secret of a token; its lease
        lasts at least one `life` more."""
        self.attach = Statement("attach", common.attach(words), _COUNT)
        """Give the live tenure of a token the owner `heir`, a flow's; its lease ends one `life` from now."""
        self.release = Statement("release", common.release(words), numbers, critical=True)
        """End a tenure; the key is free once `min_hold` is over -> the first ticket not served if it is free now, 0 for
        none."""
        self.pin = Statement("pin", self.PIN, _ROWS)
        """In the caller's transaction: no new tenure can begin until it ends -> whether it sees this tenure.

        Always over `locks`: sessions may resolve that name to different tables, so `tenures.pin` qualifies it.
        """
        self.locate = _if_needed("locate", self.LOCATE)
        """Where the lock's own sessions find `locks` -> its schema; true on a node of a Galera cluster."""
        self.stale = Statement("stale", common.stale(words), _ROWS)
        """The next keys after `after`, at most a hundred, in order -> key, whether it has been free or expired for
        longer than `retention`."""
        self.reap = Statement("reap", common.reap(words), _COUNT, row_locked=_SKIP)
        """Delete such rows among `names`; none if one of them is locked."""

    def _write_those_of_waiters(self, words: Vocabulary) -> None:
        """The statements on `lock_waiters`, and on the two ticket numbers of a key's row."""
        numbers = words.numbers
        self.join = Statement("join", self.JOIN, numbers)
        """Join a key's queue -> ticket; with `join_answers` also seconds until the lease ends and the first ticket not
        served (as `queue_status`); nothing if the key has no row, or another waiter has just got that ticket."""
        self.announce = Statement("announce", common.announce(words), numbers)
        """Record in the key's row that the ticket was given out, if `join` does not, or the row was created anew since
        -> milliseconds until the lease ends, 0 if the key is not held."""
        self.queue_status = Statement("queue_status", common.queue_status(words), _ROWS)
        """The queue as seen from a waiter: whether it has the key, seconds until the lease ends (less than 0: since it
        ended or was released), first ticket not served, last ticket, number of live waiters among the 16 nearest before
        it (1 if all of those are dead, as there may be others), whether it has a place."""
        self.grant = Statement("grant", self.GRANT, numbers, critical=True, row_locked=_SKIP, owners=(2,))
        """Let the first live waiter from ticket `first` on begin a tenure that ends with its place, if the key has no
        other holder -> its ticket, channel, owner token, fence, milliseconds from its join to the end of the tenure if
        that may be earlier than the place's, else 0, and not null if the database has notified its process, as one not
        `here`. If not `grant_answers`: let the live waiter `heir` begin it -> fence."""
        self.accept = Statement("accept", common.accept(words), numbers, critical=True)
        """Let a waiter's new tenure count from now, and its lease last a whole life -> fence."""
        self.adopt_place = Statement("adopt_place", common.adopt_place(words), _COUNT, critical=True)
        """Give a waiter's place to another flow of the same process, under its own token `heir`."""
        hand_over_local = self.HAND_OVER_LOCAL or common.hand_over_local(words)
        self.hand_over_local = Statement("hand_over_local", hand_over_local, numbers, critical=True, row_locked=_SKIP)
        """End a tenure and begin one of the owner `heir`, if the queue is empty or `handovers_left` is positive ->
        fence; and milliseconds of its lease, if that may be less than a whole life (with `covers` 1), else 0."""
        self.leave_queue = Statement("leave_queue", self.LEAVE_QUEUE, _COUNT, critical=True)
        """Delete places."""
        self.first_waiter = Statement("first_waiter", common.first_waiter(words), _ROWS, owners=(2,))
        """The first live waiter from ticket `first` on -> ticket, channel, owner token."""
        self.call = _if_needed("call", self.CALL)
        """Notify the process that listens on a channel, if the database can."""
        self.sleep_until_killed = _if_needed("sleep_until_killed", self.SLEEP_UNTIL_KILLED)
        """If a notification has no payload: wait `seconds` for one, unless a waiter of `places` has been granted its
        key -> ticket and key of each; a row without a key when the time is up."""
        self.unlogged = _if_needed("unlogged", self.UNLOGGED)
        """For that: keep the session's statements out of the server's slow log, and let the server end it soon when it
        is silent."""
        self.listen = _if_needed("listen", self.LISTEN)
        """For that: let the session own the name `channel`, waiting whole `seconds` for it -> 1."""
        named = _ROWS if numbers is _ROWS else _COUNT
        self.heartbeat = Statement("heartbeat", self.HEARTBEAT, named, critical=True, owners=(0,))
        """Extend the places of many waiters that have not ended and were not served -> their owner tokens; or one empty
        row for each, from a database that cannot return them."""
        self.chain = Statement("chain", common.chain(words), _ROWS, owners=(0, 6))
        """The key that the waiter `owner` waits for, the key that its holder waits for, and so on -> of the waiter
        owner, key, ticket, host, pid, thread; of its key's holder owner; the waiter's confirmed `circle`."""
        self.confirm = Statement("confirm", common.confirm(words), _COUNT, row_locked=_SKIP)
        """Record that the waiter `owner` sees itself in the `circle` of that digest."""
        self.clear = Statement("clear", common.clear(words), _COUNT)
        """Clear a queue without live waiters, unless one has joined after ticket `last`."""
        self.dead = Statement("dead", common.dead(words), _ROWS, owners=(0,))
        """The next waiters after the owner token `after`, as `stale` -> owner token, whether dead for longer than
        `retention`."""
        self.forget = Statement("forget", common.forget(words), _COUNT, row_locked=_SKIP)
        """Delete such rows, as `reap`."""

    def _write_those_of_shares(self, words: Vocabulary) -> None:
        """The statements on the rows with keys between `low` and `high`, beside the key's own row, the door."""
        self.read = Statement("read", self.READ, words.numbers, row_locked=_SKIP)
        """Begin a reader's tenure on a row of its own, if no writer has the door and, unless `admitted`, none waits
        there; with a `holder`, only if that one has the door, with the fence `holders_fence` -> fence."""
        self.take_slot = Statement("take_slot", shares.take_slot(words), words.numbers, row_locked=_SKIP)
        """As `take`, for a slot, if the door is free and nobody waits there -> fence."""
        self.alone = Statement("alone", shares.alone(words), _COUNT, critical=True)
        """If there is no share, let the tenure of the door's holder count from now on; its lease gets no shorter -> one
        row."""
        leaving = shares.await_leaving(words)
        self.await_leaving = Statement("await_leaving", leaving, _COUNT, critical=True)
        """Let the lease of the door's holder end one life from now, and have it notified on `channel` when a share is
        left, unless it was `alone` -> one row."""
        self.listed = Statement("listed", shares.listed(words), _ROWS, owners=(1,))
        """At most `most` shares, in the order of their keys -> key, owner token, fence, seconds until the lease ends (0
        or less if the share is free)."""
        self.end_expired = Statement("end_expired", shares.end_expired(words), _COUNT, row_locked=_SKIP)
        """Delete those of `names` that are free or expired and that no transaction pins."""
        self.leaving_answers = bool(self.LEAVE_READ)
        """Whether the statements that leave also answer as `awaited`; else that is sent after them."""
        leave_read = self.LEAVE_READ or shares.delete_share(words)
        self.leave_read = Statement("leave_read", leave_read, _ROWS if self.LEAVE_READ else _COUNT, critical=True)
        """End a reader's tenure, and delete its row."""
        leave_slot = Statement("leave_slot", self.LEAVE_SLOT, _ROWS, critical=True)
        self.leave_slot = leave_slot if self.LEAVE_SLOT else self.release
        """End a tenure of a share whose row is kept."""
        self.awaited = Statement("awaited", shares.awaited(words), _ROWS, critical=True)
        """Read where the door's holder waits for the end of a share -> channel (null if it does not wait), fence."""

    def over(self, tables: Tables) -> Dialect:
        """The same dialect over these tables."""
        if tables == self.tables:
            return self
        found = copy(self)
        for name, statement in vars(self).items():
            if isinstance(statement, Statement) and statement is not self.pin:
                setattr(found, name, statement.over(tables, self.quote))
        found.tables = tables
        found.epoch = self.epoch and Epochs(*[each.over(tables, self.quote) for each in self.epoch])
        return found


def _if_needed(name: str, text: str) -> Statement | None:
    return Statement(name, text, Reply.ROWS) if text else None
