"""Description of a transaction that keeps a key from being taken; loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dblock.core.text import printable


class Pin(NamedTuple):
    """A transaction that keeps a key from being taken, by guard() or by a lock on the key's row."""

    session: str
    """The server's number of its session; for a prepared transaction, which has none, its name."""
    end: str
    """The SQL that ends it."""
    sure: bool
    """False: one of several candidates; the server does not say which."""
    age: float | None
    """Seconds since it began; None without the right to see that."""
    user: str
    program: str
    client: str
    doing: str
    """The server's word, `idle in transaction` for example; empty without the right to see that."""
    doing_for: float | None

    def told(self, span: Callable[[float], str]) -> str:
        """The session and its times in words; `span` formats a length of time."""
        name = f"session {self.session}" if self.session.isdecimal() else f"prepared transaction {self.session!r}"
        facts = [f"of {self.user}" if self.user else "", self.program, self.client]
        doing = self.doing if self.doing_for is None else f"{self.doing} for {span(self.doing_for)}"
        age = "" if self.age is None else f"its transaction is open for {span(self.age)}"
        who = f"{'' if self.sure else 'perhaps '}{name} {', '.join(filter(None, facts))}".rstrip()
        return printable(", ".join(filter(None, (who, doing, age))))


class Pinned(NamedTuple):
    """The transactions that keep a key without a holder from being taken, as far as this user may see them."""

    pins: tuple[Pin, ...]
    hidden: str = ""
    """What the database does not show to this user, and which right would show it."""

    def told(self, span: Callable[[float], str] = lambda seconds: f"{seconds:.1f} s") -> list[str]:
        """The transactions, each with the SQL that ends it, and what is hidden."""
        known = [f"{each.told(span)}; to end it: {printable(each.end)}" for each in self.pins]
        return [*known, self.hidden] if self.hidden else known
