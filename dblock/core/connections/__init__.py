"""The connections that the lock's statements run on, and deadlines for their answers."""
