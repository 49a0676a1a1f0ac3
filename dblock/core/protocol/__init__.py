"""What is asked of the database, as steps: the rules of one row, the durable queue, and who drives the steps."""
