"""docs/support.md, which the matrix of kernels writes."""

from pathlib import Path

import pytest
import support_table
from preflash import _core

DOCS = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def test_the_page_is_the_table():
    assert DOCS.read_text() == support_table.table()


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
