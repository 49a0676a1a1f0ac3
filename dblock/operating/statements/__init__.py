"""The SQL of the administration, of the history, and of the search for transactions that pin keys."""
