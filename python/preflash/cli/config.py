"""`config`: how a compiler finds the C library that the package carries."""

from __future__ import annotations

import argparse
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def execute(args: argparse.Namespace) -> int:
    library, include = PACKAGE / "lib", PACKAGE / "include"
    words = {
        "cflags": [f"-I{include}"],
        "libs": [f"-L{library}", "-lpreflash", f"-Wl,-rpath,{library}"],
        "libdir": [str(library)],
        "includedir": [str(include)],
    }
    asked = [name for name in words if getattr(args, name)] or ["cflags", "libs"]
    print(" ".join(word for name in asked for word in words[name]))
    return 0
