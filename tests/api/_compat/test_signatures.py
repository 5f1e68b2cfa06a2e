"""Public names have FlashInfer's homes, and methods of one wrapper take the same options.

The names, their order and defaults are in the stubs: tests/codegen/test_stubs.py compares them,
test_calls.py and test_direct_calls.py call by position.
"""

import importlib
import inspect

import preflash
import pytest

HOMES = "attention cascade cudnn decode page pod prefill quantization sparse"


@pytest.mark.parametrize("home", HOMES.split())
def test_names_are_in_their_module_and_on_top(home):
    module = importlib.import_module(f"preflash.{home}")
    assert getattr(preflash, home) is module
    for name in module.__all__:
        assert getattr(module, name) is getattr(preflash, name)
        assert inspect.getdoc(getattr(module, name))
        assert name in preflash.__all__


@pytest.mark.parametrize("name", ["Paged", "Ragged"])
def test_methods_of_a_wrapper(name):
    wrapper = getattr(preflash, f"BatchPrefillWith{name}KVCacheWrapper")
    plan, begin, size = (
        inspect.signature(getattr(wrapper, method)).parameters
        for method in ("plan", "begin_forward", "workspace_size")
    )
    assert list(plan.values()) == list(begin.values())
    assert set(plan) - {"non_blocking"} == set(size) - {"non_blocking"}
