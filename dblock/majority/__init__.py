"""The majority lock: a key that is held in most of several independent databases.

`protocol` has the theory, and `statements` its SQL. `asking` runs steps on several databases side by side. `member` has
the steps on one database, `attempts` what an acquire does, `held` what is held, and `base`, `locks` and `options` the
lock objects.

Rule: the package needs the core and the standard library only, and the core does not import it.
"""
