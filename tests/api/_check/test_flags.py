"""Every parameter that a signature calls bool refuses 0 and 1 as 2: they are another argument's."""

import inspect
from functools import partial

import numpy as np
import preflash
import pytest
import torch
from preflash.testing import runner
from refusals import refused

HEADS, HEAD_DIM, PAGE = 2, 64, 16
SHAPE = (HEADS, HEADS, HEAD_DIM)
LENGTHS = torch.tensor([0, 3], dtype=torch.int32)
PAGES = (torch.tensor([0, 1], dtype=torch.int32), *torch.tensor([[0], [3]], dtype=torch.int32))
ROWS, ROW, CACHE = (
    torch.ones(shape, dtype=torch.float16)
    for shape in ((3, HEADS, HEAD_DIM), (1, HEADS, HEAD_DIM), (1, 2, PAGE, HEADS, HEAD_DIM))
)
# name: (arguments of plan(), arguments of run())
WRAPPERS = {
    "BatchPrefillWithPagedKVCacheWrapper": ((LENGTHS, *PAGES, *SHAPE, PAGE), (ROWS, CACHE)),
    "BatchPrefillWithRaggedKVCacheWrapper": ((LENGTHS, LENGTHS, *SHAPE), (ROWS, ROWS, ROWS)),
    "BatchDecodeWithPagedKVCacheWrapper": ((*PAGES, *SHAPE, PAGE), (ROW, CACHE)),
    "PODWithPagedKVCacheWrapper": ((*PAGES, *SHAPE, PAGE), (ROWS, ROWS, ROWS, ROW, CACHE)),
    "BatchPODWithPagedKVCacheWrapper": (
        (LENGTHS, *PAGES, LENGTHS, *PAGES, *SHAPE, PAGE), (ROWS, CACHE, ROWS, CACHE),
    ),
    "MultiLevelCascadeAttentionWrapper": (
        (*([array] for array in (LENGTHS, *PAGES)), *SHAPE, PAGE), (ROWS, CACHE),
    ),
}  # fmt: skip
CUDNN = {
    "max_token_per_sequence": 3, "max_sequence_kv": 3, "actual_seq_lens_q": torch.tensor([3]),
    "actual_seq_lens_kv": torch.tensor([3]), "causal": True, "return_lse": False,
}  # fmt: skip


def made(name, **options):
    levels = (1,) if name.startswith("MultiLevel") else ()
    return getattr(preflash, name)(*levels, runner.workspace(), **options)


def planned(name, **options):
    wrapper = made(name)
    wrapper.plan(*WRAPPERS[name][0], q_data_type=torch.float16, **options)
    return wrapper


def called(name, method, **flags):
    return getattr(planned(name), method)(*WRAPPERS[name][1], **flags)


def calls():
    """Yields functions that have flags, each with a call that takes them by name."""
    for name in WRAPPERS:
        kind = getattr(preflash, name)
        yield kind.__init__, partial(made, name)
        yield kind.plan, partial(planned, name)
        yield kind.run, partial(called, name, "run")
        if hasattr(kind, "forward_return_lse"):
            yield kind.forward, partial(called, name, "forward")
    single, decode = preflash.single_prefill_with_kv_cache, preflash.single_decode_with_kv_cache
    cudnn = preflash.cudnn_batch_prefill_with_kv_cache
    yield single, partial(single, ROWS, ROWS, ROWS)
    yield decode, partial(decode, ROW[0], ROWS, ROWS)
    yield cudnn, partial(cudnn, ROWS, ROWS, ROWS, 0.1, runner.workspace(), **CUDNN)


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
