"""The command line in a process of its own, as a user calls it."""

import subprocess
import sys
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


@pytest.fixture
def preflash_command(tmp_path):
    """Runs `python -m preflash <arguments>` outside the source tree."""

    def call(*arguments: str) -> Finished:
        done = subprocess.run(
            [sys.executable, "-m", "preflash", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return call
