"""The protocol as steps: the rules of one row, the durable queue, and the drivers that run the steps."""
