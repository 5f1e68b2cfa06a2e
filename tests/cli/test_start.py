"""Help and usage errors come before torch is imported; `import preflash` is eager elsewhere.
Commands end with one line and exit code 2 where their output cannot be written."""

import os
import re
import sys
import venv
from pathlib import Path

import preflash
import pytest
from processes import finished

PACKAGES = str(Path(preflash.__file__).parents[1])
PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()
(MAIN,) = re.findall(
    r'^\[project.scripts\]\npreflash = "preflash.cli:(\w+)"', PROJECT, re.MULTILINE
)
SCRIPT = f"import sys\nfrom preflash.cli import {MAIN}\nsys.exit({MAIN}())\n"


def started(*command: str, cwd: Path):
    return finished(*command, cwd=cwd, PYTHONPATH=os.pathsep.join([PACKAGES, str(cwd)]))


def imported(done) -> set[str]:
    times = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in times}


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> list[str]:
    """Writes the console script as pip does, beside the interpreter of an environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    path = folder / "bin" / "preflash"
    path.write_text(SCRIPT)
    return [str(folder / "bin" / "python"), "-X", "importtime", str(path)]


MODULE = [sys.executable, "-X", "importtime", "-m", "preflash"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 0, "variants"),
        (("--help",), 0, "variants"),
        (("--version",), 0, preflash.__version__),
        (("bench", "--help"), 0, "--compare"),
        (("variants", "--help"), 0, "sm80 (fa2)"),
        (("bench", "--repeats", "0"), 2, "0 is not a positive number"),
        (("benchmark",), 2, "variants"),
        (("config",), 0, "-lpreflash"),
    ],
)
def test_answers_before_torch_is_imported(script, tmp_path, arguments, code, says):
    for name, start in (("python -m preflash", MODULE), ("preflash", script)):
        done = started(*start, *arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert says in (done.stderr if code else done.stdout)
        if "--help" in arguments:
            assert f"usage: {name} " in done.stdout
        assert "argparse" in imported(done)
        assert "torch" not in imported(done)


PROGRAM = """
import sys
import preflash
print("torch" in sys.modules, hasattr(preflash, "BatchAttention"), sys.argv[1:])
"""


def test_other_programs_are_not_taken_for_the_command(tmp_path):
    """A package that imports preflash while `python -m` locates it, and a program of this name."""
    package = tmp_path / "other"
    package.mkdir()
    (package / "__init__.py").write_text(PROGRAM)
    (package / "__main__.py").write_text("")
    (tmp_path / "preflash").write_text(PROGRAM)
    for program in (["-m", "other"], [str(tmp_path / "preflash")]):
        done = started(sys.executable, *program, "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "True True ['--help']\n"


def test_dir_lists_public_names():
    listed = {name for name in dir(preflash) if not name.startswith("__")}
    assert listed == {name for name in preflash.__all__ if not name.startswith("__")}
    assert all(hasattr(preflash, name) for name in listed)


def shell(command: str):
    line = command.replace("preflash", f"{sys.executable} -m preflash")
    return finished("bash", "-o", "pipefail", "-c", line)


def test_commands_without_a_stderr():
    done = shell("preflash check --quick --backend cpu 2>/dev/full")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all good")
    # The message does not go to stdout instead.
    done = shell("preflash check --backend fa9 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_pipe_whose_reader_is_gone():
    done = shell("preflash variants | exec true")
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_a_full_disk():
    done = shell("preflash info >/dev/full")
    assert done.returncode == 2
    assert re.fullmatch(r"preflash .*cannot write its output: No space left.*\n", done.stderr)
