"""Checkpoints in an object store (`checkpoint.remote`)."""
