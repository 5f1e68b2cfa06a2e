"""Runs a command in a process of its own."""

import os
import subprocess


def finished(*command: object, cwd=None, **environment: str) -> subprocess.CompletedProcess:
    """Returns what the command printed, and its exit code."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
