"""The printed examples, the stubs and typed_calls.py pass mypy --strict and pyright."""

import json
import pathlib
import re
import sys

import preflash
import pytest
from documents import ROOT, python_blocks
from processes import finished

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


@pytest.mark.parametrize(
    "checker",
    [
        # The cache saves ten seconds where the tests run again.
        ("mypy", "--cache-dir", ROOT / "build" / "mypy"),
        ("pyright", "--pythonpath", sys.executable),
    ],
    ids=["mypy", "pyright"],
)
def test_the_files_of_a_user_and_the_stubs_pass(project, checker):
    pytest.importorskip(checker[0])
    assert (PACKAGE / "py.typed").is_file()
    files = [path.name for path in sorted(project.glob("*.py"))]
    done = finished(sys.executable, "-m", *checker, *files, *STUBS, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
