"""Commands end with one line and exit code 2 where their output cannot be written, and quietly
where nobody reads it."""

import sys

from preflash import cli
from preflash.cli.machine import choose_places
from processes import finished

PYTHON = f"{sys.executable} -m preflash"


def shell(command: str):
    return finished("bash", "-o", "pipefail", "-c", command)


def test_commands_without_a_stderr():
    done = shell(f"{PYTHON} check --quick --backend cpu 2>/dev/full")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all good")
    # The message does not go to stdout instead.
    done = shell(f"{PYTHON} check --backend fa9 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_closed_pipe():
    """The reader is gone before the first byte."""
    done = shell(f"{PYTHON} variants | exec true")
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_a_full_disk():
    done = shell(f"{PYTHON} info >/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("preflash ")
    assert done.stderr.count("\n") == 1
    assert "cannot write its output: No space left on device" in done.stderr


def test_the_environment_chooses_the_backend(monkeypatch):
    """The commands look at PREFLASH_BACKEND alone."""
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    assert [place.backend for place in choose_places(None)] == ["cpu"]


def test_what_is_tried_is_not_left(tmp_path):
    cli.check_writable("--json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / "old.json"
    old.write_text("old")
    cli.check_writable("--json", old)
    assert old.read_text() == "old"
