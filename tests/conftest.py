"""Tests marked `gpu` are skipped where there is no GPU or no kernel library."""

from __future__ import annotations

import functools
import gc
import os

import pytest

# What holds for fa3's soft cap by the GPU's own tanh is for tests/gpu/test_gpu_soft_cap.py.
os.environ.setdefault("PREFLASH_SOFT_CAP", "exact")


@functools.cache
def _why_no_gpu() -> str:
    import torch
    from preflash import _core

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if _core.cuda_device_count() == 0:
        return f"the kernel libraries see no GPU: {_core.cuda_error() or 'no device'}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and _why_no_gpu():
            item.add_marker(pytest.mark.skip(reason=_why_no_gpu()))


def pytest_collection_finish() -> None:
    """Collecting garbage, which some tests do often, need not go through all tests each time."""
    gc.collect()
    gc.freeze()
