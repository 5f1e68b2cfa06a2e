"""Helpers run the cpu backend, start processes, and repeat a file with narrower vectors."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from preflash import _core
from preflash.testing import Inputs, runner

_ISAS = ["generic", "avx2", "avx512"]
_IS_INNER = "PREFLASH_CPU_ISA" in os.environ


def result(inputs: Inputs, **overrides) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and LSE of a fresh wrapper."""
    return runner.run(runner.planned(inputs, backend="cpu", **overrides), inputs)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _finished(*arguments: str, **environment: str) -> str:
    """Runs Python in a new process and returns what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def python(code: str, *arguments: str, **environment: str) -> str:
    """Runs code in a new process and returns what it prints."""
    return _finished("-c", textwrap.dedent(code), *arguments, **environment)


def on_every_instruction_set(test):
    """Calls the test with each instruction set, but not in the inner run."""
    test = pytest.mark.parametrize("isa", _ISAS)(test)
    return pytest.mark.skipif(_IS_INNER, reason="this is the inner run")(test)


def run_again(isa: str, path: str, *options: str) -> None:
    """Runs the tests of a file with these vectors, if the machine has wider ones."""
    widest = _core.cpu_isa()
    if _ISAS.index(isa) >= _ISAS.index(widest):
        pytest.skip(f"the tests ran on {widest}")
    pytest_options = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
    _finished(*pytest_options, *options, path, PREFLASH_CPU_ISA=isa)
