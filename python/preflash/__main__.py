"""`python -m preflash`: info, variants, check, bench, demo, config."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
