"""docs/support.md says what the matrix of kernels holds."""

import re
import sys
from pathlib import Path

import pytest
import support_table
from preflash import _core

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


@pytest.mark.parametrize("family", _core.families(), ids=lambda family: family.name)
def test_a_kernel_serves_what_the_page_says(family):
    """Wherever this build has the family's kernels at all: a cell, asked of the registry."""
    options = [
        support_table._usual(dtypes, qk, vo)
        for dtypes in support_table._DTYPES
        for qk, vo in support_table._HEAD_DIMS
    ]
    served = [one for one in options if _core.find_error(family, one) is None]
    if not served:
        pytest.skip("no kernels of this family in this build")
    assert all(_core.in_matrix(family, one) for one in served)
    too_large = served[0].replace(head_dim_qk=1024, head_dim_vo=1024)
    assert not _core.in_matrix(family, too_large)
