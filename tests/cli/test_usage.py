"""Commands end with one line and exit code 2 where their output cannot be written or the
environment is invalid."""

import os
import subprocess
import sys

import prepass_policy
import pytest
from preflash import cli
from preflash.cli.machine import choose_places

PYTHON = f"{sys.executable} -m preflash"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


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


@pytest.mark.parametrize("command", ["variants", "info"])
def test_a_closed_pipe(command):
    """The reader is gone before the first byte."""
    done = shell(f"{PYTHON} {command} | exec true")
    assert done.returncode == 128 + 13
    assert done.stderr == ""


def test_a_pipe_that_closes_midway():
    """Behind the first line: the table may be written by then, or not."""
    done = shell(f"{PYTHON} variants | head -n 1")
    assert done.returncode in (0, 128 + 13)
    assert (done.stdout[:4], done.stdout.count("\n"), done.stderr) == ("| id", 1, "")


@pytest.mark.parametrize("command", ["info", "check --quick --backend cpu"])
def test_a_full_disk(command):
    done = shell(f"{PYTHON} {command} 2>&1 >/dev/full | grep -v '^check: ' >&2; exit $PIPESTATUS")
    assert done.returncode == 2
    assert done.stderr.startswith("preflash ")
    assert done.stderr.count("\n") == 1
    assert "cannot write its output: No space left on device" in done.stderr


def refused(preflash_command, command: str, message: str) -> None:
    """Runs the command in this process, for cases that do not depend on how it was started."""
    done = preflash_command(*command.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err


@pytest.mark.parametrize("command", ["check --quick", "bench --quick", "demo"])
@pytest.mark.parametrize("name", ["PREFLASH_BACKEND", "PREFLASH_PREPASS"])
def test_an_environment_that_says_nonsense(monkeypatch, preflash_command, name, command):
    monkeypatch.setenv(name, "bogus")
    with prepass_policy.forced(os.environ.get("PREFLASH_PREPASS", "auto")):
        refused(preflash_command, command, f"{name}='bogus' in the environment")


def test_an_environment_that_replaces_the_backend(monkeypatch, preflash_command):
    """PREFLASH_BACKEND alone is checked: a check of cpu never passes for another backend, and a
    check of nothing is no success."""
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    assert [place.backend for place in choose_places(None)] == ["cpu"]
    for given, asked in (("cpu", "fa2"), ("fa2", "cpu")):
        monkeypatch.setenv("PREFLASH_BACKEND", given)
        message = f"--backend {asked}: PREFLASH_BACKEND={given} in the env"
        refused(preflash_command, f"check --quick --backend {asked}", message)


def test_what_is_tried_is_not_left(tmp_path):
    cli.check_writable("--json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / "old.json"
    old.write_text("old")
    cli.check_writable("--json", old)
    assert old.read_text() == "old"
