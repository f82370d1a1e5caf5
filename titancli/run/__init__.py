"""Prepare and start runs.

The command prepares and starts a run (`prepare`, `start`, `preview`); a launcher starts its ranks, each of
which is a `titancli.worker.rank`.
"""
