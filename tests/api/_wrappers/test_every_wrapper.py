"""`variant` and `repr()` of a wrapper name its kernels; names have FlashInfer's modules; every
parameter that a signature calls bool refuses 0 and 1 as 2: they are another argument's."""

import functools
import importlib
import inspect

import numpy as np
import preflash
import pytest
import torch
from preflash import _core
from preflash.testing import runner
from refusals import refused

HEADS = (4, 2, 64)  # query heads, KV heads, head_dim
PAGE = 16
KEYS = (5, 16)  # of two requests of one query, a page each


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


QO = index(0, 1, 2)
TABLE = (index(0, 1, 2), index(0, 1), index(*KEYS))  # indptr, pages, keys of the last page
SHARED = (index(0, 2), index(0, 1), index(2), index(PAGE))
LEVELS = [list(pair) for pair in zip(SHARED, (QO, *TABLE), strict=True)]
KEPT = (torch.ones(2, 1, 2).bool(), index(16).expand(2, -1), index(16, 8).expand(2, -1))
BF16, DIMS = {"q_data_type": "bfloat16"}, {"head_dim_qk": 64, "head_dim_vo": 64}
PAGED, DECODE = (QO, *TABLE, *HEADS, PAGE), (*TABLE, *HEADS, PAGE)
# Options of the constructor, arguments and options of plan().
WRAPPERS = {
    "BatchAttention": ({}, (QO, *TABLE[:2], index(*KEYS), *HEADS, 64, PAGE), {}),
    "BatchPrefillWithRaggedKVCacheWrapper": ({}, (QO, index(0, 5, 21), *HEADS), BF16),
    "BatchPrefillWithPagedKVCacheWrapper": ({}, PAGED, BF16),
    "BatchPrefillWithCausalBidirectionalRangesWrapper": (DIMS, PAGED, {}),
    "BatchAttentionWithAttentionSinkWrapper": (DIMS, PAGED, BF16),
    "BatchDecodeWithPagedKVCacheWrapper": ({}, DECODE, BF16),
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": ({}, DECODE, BF16),
    "PODWithPagedKVCacheWrapper": ({}, DECODE, BF16),
    "BatchPODWithPagedKVCacheWrapper": ({}, (QO, *TABLE, *PAGED), BF16),
    "MultiLevelCascadeAttentionWrapper": ({}, (*LEVELS, *HEADS, PAGE), BF16),
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": ({}, (*DECODE, "bfloat16"), {}),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": ({}, PAGED, BF16),
    "BlockSparseAttentionWrapper": (
        {},
        (index(0, 1), index(1), 16, 32, 16, 16, *HEADS),
        {**BF16, "o_data_type": "bf16"},
    ),
    "VariableBlockSparseAttentionWrapper": ({}, (*KEPT, *HEADS), BF16),
}


def test_every_wrapper_is_named():
    public = {name for name in preflash.__all__ if inspect.isclass(getattr(preflash, name))}
    assert set(WRAPPERS) == public


@pytest.mark.parametrize("name", WRAPPERS)
def test_variant_and_repr(name):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options, arguments, plan_options = WRAPPERS[name]
    given = {
        "BatchAttention": ("NHD", device),
        "MultiLevelCascadeAttentionWrapper": (2, runner.workspace(device)),
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": (
            runner.workspace(device),
            *(array.to(device) for array in TABLE),
        ),
    }.get(name, (runner.workspace(device),))
    wrapper = getattr(preflash, name)(*given, **options)
    assert wrapper.variant is None
    assert repr(wrapper).startswith(f"{name}(")
    assert "not planned" in repr(wrapper)
    plan = wrapper.begin_forward if "SharedPrefix" in name else wrapper.plan
    plan(*arguments, **plan_options)
    ids = wrapper.variant.split(", ")
    assert len(ids) == (2 if name == "MultiLevelCascadeAttentionWrapper" else 1)
    assert set(ids) <= {kernel["id"] for kernel in _core.kernels()}
    assert f"variant={wrapper.variant!r}" in repr(wrapper)
    assert "not planned" not in repr(wrapper)
    with pytest.raises(AttributeError):
        wrapper.variant = "another"


HOMES = "attention cascade cudnn decode page pod prefill quantization sparse"


@pytest.mark.parametrize("home", HOMES.split())
def test_names_are_in_their_module_and_on_top(home):
    module = importlib.import_module(f"preflash.{home}")
    assert set(module.__all__) <= set(preflash.__all__)
    assert all(getattr(module, name) is getattr(preflash, name) for name in module.__all__)


@pytest.mark.parametrize("name", ["Paged", "Ragged"])
def test_methods_of_a_wrapper(name):
    wrapper = getattr(preflash, f"BatchPrefillWith{name}KVCacheWrapper")
    plan, begin, size = (
        inspect.signature(getattr(wrapper, method)).parameters
        for method in ("plan", "begin_forward", "workspace_size")
    )
    assert list(plan.values()) == list(begin.values())
    assert set(plan) - {"non_blocking"} == set(size) - {"non_blocking"}


ROWS, KEYS_OF_ALL = torch.ones(2, 4, 64).bfloat16(), torch.ones(21, 2, 64).bfloat16()
CACHE = torch.ones(2, 2, PAGE, 2, 64).bfloat16()
# Arguments of run().
RUNS = {
    "BatchPrefillWithPagedKVCacheWrapper": (ROWS, CACHE),
    "BatchPrefillWithRaggedKVCacheWrapper": (ROWS, KEYS_OF_ALL, KEYS_OF_ALL),
    "BatchDecodeWithPagedKVCacheWrapper": (ROWS, CACHE),
    "PODWithPagedKVCacheWrapper": (ROWS, KEYS_OF_ALL, KEYS_OF_ALL, ROWS, CACHE),
    "BatchPODWithPagedKVCacheWrapper": (ROWS, CACHE, ROWS, CACHE),
    "MultiLevelCascadeAttentionWrapper": (ROWS, CACHE),
}
CUDNN = {
    "max_token_per_sequence": 2, "max_sequence_kv": 21, "actual_seq_lens_q": torch.tensor([2]),
    "actual_seq_lens_kv": torch.tensor([21]), "causal": True, "return_lse": False,
}  # fmt: skip


def made(name, **flags):
    levels = (2,) if name.startswith("MultiLevel") else ()
    return getattr(preflash, name)(*levels, runner.workspace(), **flags)


def planned(name, **flags):
    wrapper, (_, arguments, options) = made(name), WRAPPERS[name]
    wrapper.plan(*arguments, **options | flags)
    return wrapper


def called(name, method, **flags):
    return getattr(planned(name), method)(*RUNS[name], **flags)


def calls():
    """Yields functions that have flags, each with a call that takes them by name."""
    for name in RUNS:
        kind = getattr(preflash, name)
        yield kind.__init__, functools.partial(made, name)
        yield kind.plan, functools.partial(planned, name)
        yield kind.run, functools.partial(called, name, "run")
        if hasattr(kind, "forward_return_lse"):
            yield kind.forward, functools.partial(called, name, "forward")
    given = (ROWS, KEYS_OF_ALL, KEYS_OF_ALL)
    single, decode = preflash.single_prefill_with_kv_cache, preflash.single_decode_with_kv_cache
    cudnn = preflash.cudnn_batch_prefill_with_kv_cache
    yield single, functools.partial(single, *given)
    yield decode, functools.partial(decode, ROWS[0], *given[1:])
    yield cudnn, functools.partial(cudnn, *given, 0.1, runner.workspace(), **CUDNN)


FLAGS = {
    f"{function.__qualname__}-{name}": (call, name)
    for function, call in calls()
    for name, parameter in inspect.signature(function).parameters.items()
    if "bool" in str(parameter.annotation) and "Tensor" not in str(parameter.annotation)
}
assert len(FLAGS) > 40


@pytest.mark.parametrize(("call", "name"), FLAGS.values(), ids=FLAGS)
def test_an_integer_is_no_flag(call, name):
    for value in (False, np.bool_(False)):  # a cached plan of False must not answer for 0
        call(**{name: value})
    for value in (0, 1, 2):
        says = rf"{name}\b.*(True|False)"
        refused(says, call, error=(TypeError, NotImplementedError), **{name: value})
