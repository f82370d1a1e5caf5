"""Ends the process."""

import sys

sys.exit("calls_exit wants to stop")
