"""docs/support.md says what the matrix of kernels holds."""

import re
import sys
from pathlib import Path

import support_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "support.md"


def test_the_page_is_the_table():
    assert DOCS.read_text() == support_table.page()


def test_wheels_and_source_builds_have_the_code_that_the_page_names():
    options = (ROOT / "CMakeLists.txt").read_text()
    assert re.search(r'set\(PREFLASH_ARCHS "(.*?)" CACHE', options)[1] == support_table.ARCHS
    wheels = tomllib.loads((ROOT / "wheels" / "matrix.toml").read_text())["cuda"]
    by_machine = {row.get("machine", "x86_64"): row["archs"] for row in wheels}
    assert by_machine == {"x86_64": support_table.ARCHS, "aarch64": "90+PTX"}
