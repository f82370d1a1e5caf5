"""From a request to a run's end.

The command prepares and starts a run (`prepare`, `start`, `preview`); a launcher starts its ranks; each rank
is a `worker`. Only what a rank runs stands below the launchers.
"""
