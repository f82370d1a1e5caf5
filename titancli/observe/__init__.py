"""Watching a run: metrics, events, what people see of it."""
