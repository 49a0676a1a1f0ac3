"""What a user of the lock sees, on either face."""
