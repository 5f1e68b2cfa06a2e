"""Tests run once more with narrower vectors than this machine's."""

import os
import subprocess
import sys

import pytest
from preflash import _core

_ISAS = ["generic", "avx2", "avx512"]
_IS_INNER = "PREFLASH_CPU_ISA" in os.environ


def on_every_instruction_set(test):
    """Calls the test with each instruction set, but not in the inner run."""
    test = pytest.mark.parametrize("isa", _ISAS)(test)
    return pytest.mark.skipif(_IS_INNER, reason="this is the inner run")(test)


def run_again(isa: str, path: str, *options: str) -> None:
    """Runs the tests of a file with these vectors, if the machine has wider ones."""
    widest = _core.cpu_isa()
    if _ISAS.index(isa) >= _ISAS.index(widest):
        pytest.skip(f"the tests ran on {widest}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, path],
        env={**os.environ, "PREFLASH_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
