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
    options = support._usual(support._DTYPES[0], 128, 128)
    compiled = [kernel for kernel in _core.kernels() if kernel["family"] == family.name]
    if not compiled:
        pytest.skip("no kernels of this family in this build")
    assert _core.in_matrix(family, options)
    assert _core.find_error(family, options) is None
    assert not _core.in_matrix(family, options.replace(head_dim_qk=1024, head_dim_vo=1024))
