"""`python tests/fuzz` from anywhere, or `python -m fuzz` where tests/ is on the path."""

import pathlib
import sys

if not __package__:  # a folder by its name: its modules are a package's all the same
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
