"""docs/support.md, which the matrix of kernels writes."""

from pathlib import Path

import pytest
from preflash import _core
from preflash.cli import main, support

DOCS = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def test_the_page_is_what_the_command_prints(capsys):
    assert main(["variants", "--support"]) == 0
    assert DOCS.read_text() == capsys.readouterr().out


@pytest.mark.parametrize("family", _core.families(), ids=lambda family: family.name)
def test_a_kernel_serves_what_the_page_says(family):
    """Wherever this build has the family's kernels at all: a cell, asked of the registry."""
    options = [
        support._usual(dtypes, qk, vo)
        for dtypes in support._DTYPES
        for qk, vo in support._HEAD_DIMS
    ]
    served = [one for one in options if _core.find_error(family, one) is None]
    if not served:
        pytest.skip("no kernels of this family in this build")
    assert all(_core.in_matrix(family, one) for one in served)
    too_large = served[0].replace(head_dim_qk=1024, head_dim_vo=1024)
    assert not _core.in_matrix(family, too_large)
