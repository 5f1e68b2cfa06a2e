"""A build may hold part of the matrix; its GPU tests run what it holds.

A test that needs a variant which is not compiled is skipped, and fails where PREFLASH_REQUIRE_ALL
is set: a build of the whole matrix is tested with it, so that nothing is left out unseen. Any
other NotImplementedError is a failure in every build.
"""

import functools
import os

import pytest


@functools.cache
def why_no_fa3() -> str:
    """Why fa3 cannot run on the GPU that is here; empty where it can."""
    import torch
    from preflash import _core

    capability = _core.device_facts(torch.cuda.current_device())["compute_capability"]
    if capability != 90:
        return f"fa3 needs compute capability 9.0; this GPU has {capability / 10}"
    compiled = any(kernel["backend"] == "fa3" for kernel in _core.kernels())
    if not compiled and not os.environ.get("PREFLASH_REQUIRE_ALL"):
        return "fa3 is not compiled in this build"
    return ""


def skip_unless_compiled(item: pytest.Item, error: NotImplementedError) -> None:
    """Skips `item` for a variant that this build does not hold, else raises the error again."""
    on_gpu = item.get_closest_marker("gpu") is not None
    if not on_gpu or "compiled" not in str(error) or os.environ.get("PREFLASH_REQUIRE_ALL"):
        raise error
    pytest.skip(f"not compiled in this build: {error}")
