"""The connections that the statements of the lock run on, and statements that are not answered in time."""
