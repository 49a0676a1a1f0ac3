"""Getting a key, waiting for it, and giving it to whoever is next."""
