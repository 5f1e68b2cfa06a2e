"""A wrong name, of a backend or of an argument: the message has a right one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import preflash
import pytest
import torch

OURS = "must be one of auto, fa3, fa2, cpu"
WITH_CUDNN = OURS + ", cudnn"


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def tokens(count: int) -> torch.Tensor:
    return torch.zeros(count, 2, 64)


def single(**options):
    return preflash.single_prefill_with_kv_cache(*[tokens(3)] * 3, **options)


def fmha(**options):
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    return preflash.trtllm_fmha_v2_prefill(
        (tokens(3), tokens(3), tokens(3)), "SEPARATE_Q_K_V", workspace(), bounds[1:], 3, 3,
        0.125, 1.0, 1, bounds, bounds, **options,
    )  # fmt: skip


def cudnn_function(**options):
    lengths = torch.full((1, 1, 1, 1), 3, dtype=torch.int32)
    return preflash.cudnn_batch_prefill_with_kv_cache(
        tokens(3), tokens(3), tokens(3), 0.125, workspace(),
        max_token_per_sequence=3, max_sequence_kv=3, actual_seq_lens_q=lengths,
        actual_seq_lens_kv=lengths, causal=False, return_lse=False, **options,
    )  # fmt: skip


def construct(name: str) -> Callable:
    return lambda **options: getattr(preflash, name)(workspace(), **options)


BACKENDS = {
    "paged": (construct("BatchPrefillWithPagedKVCacheWrapper"), WITH_CUDNN),
    "ragged": (construct("BatchPrefillWithRaggedKVCacheWrapper"), WITH_CUDNN),
    "cudnn": (cudnn_function, WITH_CUDNN),
    "decode": (construct("BatchDecodeWithPagedKVCacheWrapper"), OURS),
    "pod": (construct("PODWithPagedKVCacheWrapper"), OURS),
    "batch pod": (construct("BatchPODWithPagedKVCacheWrapper"), OURS),
    "sink": (construct("BatchAttentionWithAttentionSinkWrapper"), OURS),
    "single": (single, OURS),
    "fmha": (fmha, OURS),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_an_unknown_backend_lists_those_that_there_are(name):
    call, names = BACKENDS[name]
    with pytest.raises(ValueError, match=r"^backend='foo': ") as caught:
        call(backend="foo")
    assert str(caught.value) == f"backend='foo': {names}"


@pytest.mark.parametrize("name", [name for name in BACKENDS if BACKENDS[name][1] == OURS])
def test_who_has_no_cudnn_says_who_has(name):
    with pytest.raises(NotImplementedError, match="is taken by cudnn_batch_prefill_with_kv_cache"):
        BACKENDS[name][0](backend="cudnn")


def test_a_backend_that_is_no_text_in_spite_of_the_environment(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    with pytest.raises(TypeError, match=f"backend must be a str, {WITH_CUDNN[8:]}; got int 3"):
        construct("BatchPrefillWithPagedKVCacheWrapper")(backend=3)


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


def test_a_head_dim_of_latent_attention_says_what_would_work():
    with pytest.raises(ValueError, match="head_dim_qk = 576: must be") as caught:
        preflash.single_prefill_with_kv_cache(*[torch.zeros(3, 2, 576)] * 3)
    assert "What would work: torch's scaled_dot_product_attention; for latent" in str(caught.value)
