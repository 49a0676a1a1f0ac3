"""The majority lock: a key that is held in most of several independent databases.

`protocol` has the theory, and `statements` its SQL. `asking` runs steps on several databases side by side. `member` is
one database, with the steps there; `attempts` is what an acquire does, `held` what is held, and `base`, `locks` and
`options` are the lock objects.

Rule: the package needs the core and the standard library only, and the core does not import it.
"""
