"""Flags are bools: an integer as a flag is another argument's, and 0 and 1 are refused like 2, by
name. Every parameter that a signature calls bool is tried, a new one too."""

import inspect

import numpy as np
import preflash
import pytest
import torch
from preflash.testing import runner

HEADS, HEAD_DIM, PAGE = 2, 64, 16
SHAPE = (HEADS, HEADS, HEAD_DIM)
LENGTHS = torch.tensor([0, 3], dtype=torch.int32)
PAGES = (torch.tensor([0, 1], dtype=torch.int32), *torch.tensor([[0], [3]], dtype=torch.int32))


def floats(*shape):
    return torch.ones(*shape, dtype=torch.float16)


ROWS, ROW = floats(3, HEADS, HEAD_DIM), floats(1, HEADS, HEAD_DIM)
CACHE = floats(1, 2, PAGE, HEADS, HEAD_DIM)
NUMBERS = ([LENGTHS], [PAGES[0]], [PAGES[1]], [PAGES[2]])
# name: (arguments of plan(), arguments of run())
WRAPPERS = {
    "BatchPrefillWithPagedKVCacheWrapper": ((LENGTHS, *PAGES, *SHAPE, PAGE), (ROWS, CACHE)),
    "BatchPrefillWithRaggedKVCacheWrapper": ((LENGTHS, LENGTHS, *SHAPE), (ROWS, ROWS, ROWS)),
    "BatchDecodeWithPagedKVCacheWrapper": ((*PAGES, *SHAPE, PAGE), (ROW, CACHE)),
    "PODWithPagedKVCacheWrapper": ((*PAGES, *SHAPE, PAGE), (ROWS, ROWS, ROWS, ROW, CACHE)),
    "BatchPODWithPagedKVCacheWrapper": (
        (LENGTHS, *PAGES, LENGTHS, *PAGES, *SHAPE, PAGE),
        (ROWS, CACHE, ROWS, CACHE),
    ),
    "MultiLevelCascadeAttentionWrapper": ((*NUMBERS, *SHAPE, PAGE), (ROWS, CACHE)),
}
CUDNN = {
    "max_token_per_sequence": 3,
    "max_sequence_kv": 3,
    "actual_seq_lens_q": torch.tensor([3]),
    "actual_seq_lens_kv": torch.tensor([3]),
    "causal": True,
    "return_lse": False,
}


def made(name, **options):
    levels = (1,) if name.startswith("MultiLevel") else ()
    return getattr(preflash, name)(*levels, runner.workspace(), **options)


def planned(name, **options):
    wrapper = made(name)
    wrapper.plan(*WRAPPERS[name][0], q_data_type=torch.float16, **options)
    return wrapper


def of_wrapper(name):
    """(function with the flags, a call that takes them as keywords)"""
    kind = getattr(preflash, name)
    run = WRAPPERS[name][1]
    yield kind.__init__, lambda **flags: made(name, **flags)
    yield kind.plan, lambda **flags: planned(name, **flags)
    yield kind.run, lambda **flags: planned(name).run(*run, **flags)
    if not name.startswith(("POD", "BatchPOD", "MultiLevel")):
        yield kind.forward, lambda **flags: planned(name).forward(*run, **flags)


def calls():
    for name in WRAPPERS:
        yield from of_wrapper(name)
    single, decode = preflash.single_prefill_with_kv_cache, preflash.single_decode_with_kv_cache
    cudnn = preflash.cudnn_batch_prefill_with_kv_cache
    yield single, lambda **flags: single(ROWS, ROWS, ROWS, **flags)
    yield decode, lambda **flags: decode(ROW[0], ROWS, ROWS, **flags)
    yield cudnn, lambda **flags: cudnn(ROWS, ROWS, ROWS, 0.1, runner.workspace(), **CUDNN | flags)


def flags():
    for function, call in calls():
        for name, parameter in inspect.signature(function).parameters.items():
            kind = str(parameter.annotation)
            if "bool" in kind and "Tensor" not in kind:
                yield pytest.param(call, name, id=f"{function.__qualname__}-{name}")


FLAGS = list(flags())


def test_they_are_found():
    ids = {one.id for one in FLAGS}
    assert len(ids) == len(FLAGS) > 40
    for name in ("PODWithPagedKVCacheWrapper.run-causal_p", "single_prefill_with_kv_cache-causal"):
        assert name in ids


@pytest.mark.parametrize(("call", "name"), FLAGS)
def test_an_integer_is_no_flag(call, name):
    for value in (False, np.bool_(False)):  # a cached plan of False must not answer for 0
        call(**{name: value})
    for value in (0, 1, 2):
        with pytest.raises((TypeError, NotImplementedError), match=rf"{name}\b.*(True|False)"):
            call(**{name: value})
