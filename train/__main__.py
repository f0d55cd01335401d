"""`python -m train <command>`."""

import os
import sys

from train.cli import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed and written. Taking an interpreter with torch apart takes a second, and at times aborts.
    os._exit(code)
