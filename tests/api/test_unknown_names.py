"""An unknown keyword argument is a TypeError with the nearest name that there is."""

import sys

import preflash
import pytest
import torch

INTS = torch.tensor([0, 1], dtype=torch.int32)
Q, KV = torch.zeros(1, 2, 64), torch.zeros(3, 2, 64)
WRAPPERS = [
    preflash.BatchPrefillWithPagedKVCacheWrapper,
    preflash.BatchPrefillWithRaggedKVCacheWrapper,
    preflash.BatchDecodeWithPagedKVCacheWrapper,
    preflash.CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    preflash.BatchAttentionWithAttentionSinkWrapper,
    preflash.MultiLevelCascadeAttentionWrapper,
    preflash.PODWithPagedKVCacheWrapper,
    preflash.BatchPODWithPagedKVCacheWrapper,
]


def ragged():
    return preflash.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))


def decode():
    return preflash.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_constructors(wrapper):
    with pytest.raises(TypeError, match=r"argument 'kv_layot'\. Did you mean 'kv_layout'\?$"):
        wrapper(torch.empty(1), kv_layot="NHD")
    with pytest.raises(TypeError, match=r"argument 'xyzzy'$"):
        wrapper(torch.empty(1), xyzzy=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: preflash.single_prefill_with_kv_cache(Q, KV, KV, casual=True),
        lambda: preflash.single_prefill_with_kv_cache_return_lse(Q, KV, KV, casual=True),
        lambda: ragged().plan(INTS, INTS, 2, 2, 64, casual=True),
        lambda: ragged().begin_forward(INTS, INTS, 2, 2, 64, casual=True),
        lambda: ragged().forward(Q, KV, KV, casual=True),
    ],
)
def test_calls(call):
    with pytest.raises(TypeError, match=r"argument 'casual'\. Did you mean 'causal'"):
        call()


def test_run_of_decode():
    with pytest.raises(TypeError, match=r"argument 'skinks'\. Did you mean 'sinks'"):
        decode().run(Q, (KV, KV), skinks=None)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="run() is Python's own call")
def test_run():
    with pytest.raises(TypeError, match=r"argument 'retrun_lse'\. Did you mean 'return_lse'"):
        ragged().run(Q, KV, KV, retrun_lse=True)


def test_other_errors_are_as_they_were():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        preflash.BatchPrefillWithRaggedKVCacheWrapper()
    with pytest.raises(TypeError, match="float_workspace_buffer"):
        preflash.BatchPrefillWithRaggedKVCacheWrapper(1.0)
