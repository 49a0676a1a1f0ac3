"""Taking a key, waiting for it, and handing it over to the next waiter."""
