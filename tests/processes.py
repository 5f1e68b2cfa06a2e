"""Runs commands and Python code in processes of their own."""

import os
import subprocess
import sys
import textwrap


def finished(*command: object, cwd=None, **environment: str) -> subprocess.CompletedProcess:
    """Returns what the command printed, and its exit code."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def output_of(*command: object, cwd=None, **environment: str) -> str:
    """Returns what the command prints; its exit code must be 0."""
    done = finished(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def python(code: str, *arguments: object, **environment: str) -> str:
    """Returns what code prints that imports the modules of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    command = (sys.executable, "-c", textwrap.dedent(code), *arguments)
    return output_of(*command, **{"PYTHONPATH": path, **environment})
