"""The lock, free of any framework: standard library only. docs/architecture.md draws its packages from the bottom up.

Rule: a package imports only from those below it. An operation is a generator of steps; `protocol.drive` runs it, and a
face's store executes its statements.
"""
