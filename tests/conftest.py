"""Tests marked `gpu` are collected only where there is a GPU and its kernel library."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import pytest
from require_variant import skip_unless_compiled

# Modules of the code generator, of its tools and of the wheels, which tests import by name.
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("cmake/codegen", "tools", "wheels")]

# tests/gpu/test_gpu_soft_cap.py has the tests of fa3's soft cap by the GPU's own tanh.
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
    if _why_no_gpu():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


def pytest_report_collectionfinish() -> str:
    return f"tests for a GPU are left out: {_why_no_gpu()}" if _why_no_gpu() else ""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    try:
        return (yield)
    except NotImplementedError as error:
        skip_unless_compiled(pyfuncitem, error)


def pytest_collection_finish() -> None:
    """Collecting garbage, which some tests do often, need not go through all tests each time."""
    gc.collect()
    gc.freeze()
