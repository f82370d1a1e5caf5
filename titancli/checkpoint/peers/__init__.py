"""Copies of a run's state in the memory of its nodes, each node's also on the next one."""
