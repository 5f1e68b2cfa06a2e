"""A build may hold part of the matrix; its GPU tests run what it holds.

A test that needs a variant which is not compiled is skipped, and fails where PREFLASH_REQUIRE_ALL
is set: a build of the whole matrix is tested with it, so that nothing is left out unseen. Any
other NotImplementedError is a failure in every build.
"""

import os

import pytest


def skip_unless_compiled(item: pytest.Item, error: NotImplementedError) -> None:
    """Skips `item` for a variant that this build does not hold, else raises the error again."""
    on_gpu = item.get_closest_marker("gpu") is not None
    if not on_gpu or "compiled" not in str(error) or os.environ.get("PREFLASH_REQUIRE_ALL"):
        raise error
    pytest.skip(f"not compiled in this build: {error}")
