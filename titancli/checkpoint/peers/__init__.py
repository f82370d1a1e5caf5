"""Copies of a run's state in the memory of its nodes; each node's files are also on the next node."""
