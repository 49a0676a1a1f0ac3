"""The majority lock: a key that is held in most of several independent databases.

`dblock.majority.protocol` has the theory. `member` has the steps on one database, `attempts` what an acquire does,
`held` what is held, and `base`, `locks` and `options` the lock objects.
"""
