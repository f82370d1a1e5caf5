"""`python -m titancli`: the same as `titan`."""

import sys

from titancli.cli import main

if __name__ == "__main__":
    sys.exit(main())
