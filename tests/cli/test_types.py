"""The printed examples, the stubs and typed_calls.py pass mypy --strict and pyright."""

import json
import pathlib
import re
import subprocess
import sys

import preflash
import pytest
from documents import ROOT, python_blocks

PACKAGE = pathlib.Path(preflash.__file__).parent
STUBS = sorted(path for path in PACKAGE.glob("*.pyi") if path.name != "_core.pyi")
CALLS = pathlib.Path(__file__).with_name("typed_calls.py")

MYPY = """
[mypy]
strict = true
mypy_path = {stubs}
[mypy-preflash.*]
follow_imports = silent
[mypy-{unread}]
follow_imports = skip
follow_imports_for_stubs = true
"""
# Modules that no type of preflash needs; mypy takes four times as long with them.
OF_TORCH = ("_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor")
OF_TORCH += ("_prims", "_refs", "_subclasses", "ao", "export", "fx", "onnx", "testing")
UNREAD = (*(f"torch.{name}.*" for name in OF_TORCH), "numpy.*", "sympy.*", "transformers.*")
ANY_MODULE = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Makes a user's directory: a file for each block, and the settings of both checkers."""
    root = tmp_path_factory.mktemp("user")
    stubs = root / "stubs"
    stubs.mkdir()
    stubs.joinpath("transformers.pyi").write_text(ANY_MODULE)
    for place, block in python_blocks().items():
        name = re.sub(r"\W", "_", place) + ".py"
        root.joinpath(name).write_text(block)
    root.joinpath(CALLS.name).write_text(CALLS.read_text())
    root.joinpath("mypy.ini").write_text(MYPY.format(stubs=stubs, unread=",".join(UNREAD)))
    pyright = {"stubPath": "stubs", "reportUnnecessaryTypeIgnoreComment": "error"}
    root.joinpath("pyrightconfig.json").write_text(json.dumps(pyright))
    return root


def checked(project, *command):
    """Returns the exit code and output of a checker for the user's files and the stubs."""
    assert (PACKAGE / "py.typed").is_file()
    files = [*(path.name for path in sorted(project.glob("*.py"))), *map(str, STUBS)]
    done = subprocess.run(
        [sys.executable, "-m", *command, *files],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_mypy(project):
    pytest.importorskip("mypy")
    # The cache saves ten seconds where the tests run again.
    code, says = checked(project, "mypy", "--cache-dir", str(ROOT / "build" / "mypy"))
    assert code == 0, says


def test_pyright(project):
    pytest.importorskip("pyright")
    code, says = checked(project, "pyright", "--pythonpath", sys.executable)
    assert code == 0, says
