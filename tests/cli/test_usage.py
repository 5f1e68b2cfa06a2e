"""Commands end with one line and exit code 2 where their output cannot be written, and quietly
where nobody reads it."""

import sys

import pytest
from preflash import cli
from preflash.cli.machine import choose_places
from processes import finished

PYTHON = f"{sys.executable} -m preflash"


def shell(command: str):
    return finished("bash", "-o", "pipefail", "-c", command)


@pytest.mark.parametrize(
    ("command", "code", "out"),
    [
        ("check --quick --backend cpu 2>&-", 0, "all good\n"),
        ("check --quick --backend cpu 2>/dev/full", 0, "all good\n"),
        ("check --backend fa9 2>&-", 2, ""),  # the message does not go to stdout instead
    ],
)
def test_commands_without_a_stderr(command, code, out):
    done = shell(f"{PYTHON} {command}")
    assert done.returncode == code
    assert done.stdout[-len("all good\n") :] == out


@pytest.mark.parametrize(
    ("command", "codes", "out"),
    [
        # The reader is gone before the first byte.
        ("variants | exec true", {128 + 13}, ""),
        ("info | exec true", {128 + 13}, ""),
        # The table may be written when the reader goes, or not.
        ("variants | head -n 1", {0, 128 + 13}, "| id"),
    ],
)
def test_a_closed_pipe(command, codes, out):
    done = shell(f"{PYTHON} {command}")
    assert done.returncode in codes
    assert (done.stdout[:4], done.stdout.count("\n")) == (out, bool(out))
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["info", "check --quick --backend cpu"])
def test_a_full_disk(command):
    done = shell(f"{PYTHON} {command} 2>&1 >/dev/full | grep -v '^check: ' >&2; exit $PIPESTATUS")
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
