"""How a flow that waits for a key is woken: in its process, from its machine, by the database."""
