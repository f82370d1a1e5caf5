"""`python -m titan_sweep.job ARGUMENTS…`: titan as a job that ends with the titan that started it.

When the parent dies, this process gets SIGTERM: a run saves a checkpoint and stops.
"""

from __future__ import annotations

import sys

from titancli.commands import main
from titancli.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
