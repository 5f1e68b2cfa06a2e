"""Asserts the types that a checker must see of results: test_types.py gives this file to mypy and
pyright, and nothing runs it."""

from typing import Any

import preflash
import torch
from preflash.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from preflash.fmha_v2 import fmha_varlen, trtllm_fmha_v2_prefill
from preflash.trtllm import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from typing_extensions import assert_type

Tensor = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]


def paged(
    w: preflash.BatchPrefillWithPagedKVCacheWrapper, q: Tensor, kv: Pair, unknown: bool, any_q: Any
) -> None:
    assert_type(w.run(q, kv), Tensor)
    assert_type(w.run(any_q, kv), Tensor)
    assert_type(w.run(q, kv, return_lse=False), Tensor)
    assert_type(w.run(q, kv, return_lse=True), Pair)
    assert_type(w.run(q, kv, 1.0, 1.0, True), Pair)
    assert_type(w.run(q, kv, return_lse=unknown), Tensor | Pair)
    assert_type(w.run(q, kv, None, None, unknown), Tensor | Pair)
    assert_type(w.run_return_lse(q, kv, window_left=3), Pair)
    assert_type(w.forward(q, kv, causal=True), Tensor)
    assert_type(w.forward_return_lse(q, kv), Pair)


def ragged(
    w: preflash.BatchPrefillWithRaggedKVCacheWrapper, q: Tensor, k: Tensor, unknown: bool
) -> None:
    assert_type(w.run(q, k, k), Tensor)
    assert_type(w.run(q, k, k, True), Pair)
    assert_type(w.run(q, k, k, return_lse=True, lse_base="ln"), Pair)
    assert_type(w.run(q, k, k, return_lse=unknown), Tensor | Pair)
    assert_type(w.run_return_lse(q, k, k, lse_base="ln"), Pair)


def decode(w: preflash.BatchDecodeWithPagedKVCacheWrapper, q: Tensor, kv: Tensor) -> None:
    assert_type(w.run(q, kv, q_len_per_req=2, lse_layout="HN"), Tensor)
    assert_type(w.run(q, kv, return_lse=True), Pair)
    assert_type(w.run_return_lse(q, kv, q_len_per_req=2), Pair)


def pod(
    w: preflash.PODWithPagedKVCacheWrapper,
    both: preflash.BatchPODWithPagedKVCacheWrapper,
    q: Tensor,
    kv: Pair,
    unknown: bool,
) -> None:
    assert_type(w.run(q, q, q, q, kv, causal_p=True), Pair)
    assert_type(w.run(q, q, q, q, kv, return_lse_p=True), tuple[Pair, Tensor])
    assert_type(w.run(q, q, q, q, kv, return_lse_d=True), tuple[Tensor, Pair])
    assert_type(w.run(q, q, q, q, kv, return_lse_p=True, return_lse_d=True), tuple[Pair, Pair])
    assert_type(w.run(q, q, q, q, kv, return_lse_d=unknown), tuple[Tensor | Pair, Tensor | Pair])
    assert_type(w.run_return_lse(q, q, q, q, kv), tuple[Pair, Pair])
    assert_type(both.run(q, kv, q, kv), Pair)
    assert_type(both.run(q, kv, q, kv, return_lse=True), tuple[Pair, Pair])


def others(
    sinks: preflash.BatchAttentionWithAttentionSinkWrapper,
    ranges: preflash.BatchPrefillWithCausalBidirectionalRangesWrapper,
    mixed: preflash.BatchAttention,
    blocks: preflash.BlockSparseAttentionWrapper,
    sizes: preflash.VariableBlockSparseAttentionWrapper,
    levels: preflash.MultiLevelCascadeAttentionWrapper,
    x: Tensor,
    kv: Pair,
) -> None:
    assert_type(sinks.run(x, kv, x, 0.5), Tensor)
    assert_type(sinks.run(x, kv, x, return_lse=True), Pair)
    assert_type(ranges.run(x, kv, x), Tensor)
    assert_type(ranges.run(x, kv, x, return_lse=True), Pair)
    assert_type(mixed.run(x, kv), Pair)
    assert_type(blocks.run(x, x, x), Tensor)
    assert_type(blocks.run(x, x, x, return_lse=True), Pair)
    assert_type(sizes.run(x, x, x), Tensor)
    assert_type(sizes.run_return_lse(x, x, x), Pair)
    assert_type(levels.run(x, kv), Tensor)


def functions(x: Tensor, kv: Pair, unknown: bool) -> None:
    assert_type(preflash.single_prefill_with_kv_cache(x, x, x, causal=True), Tensor)
    assert_type(preflash.single_prefill_with_kv_cache(x, x, x, return_lse=True), Pair)
    assert_type(preflash.single_prefill_with_kv_cache(x, x, x, return_lse=unknown), Tensor | Pair)
    assert_type(preflash.single_prefill_with_kv_cache_return_lse(x, x, x), Pair)
    assert_type(preflash.single_decode_with_kv_cache(x, x, x), Tensor)
    assert_type(preflash.single_decode_with_kv_cache(x, x, x, return_lse=True), Pair)
    assert_type(
        cudnn_batch_prefill_with_kv_cache(
            x, x, x, 1.0, x, max_token_per_sequence=1, max_sequence_kv=1, causal=True,
            return_lse=True,
        ),
        Pair,
    )  # fmt: skip
    assert_type(
        cudnn_batch_prefill_with_kv_cache(
            x, x, x, 1.0, x, max_token_per_sequence=1, max_sequence_kv=1, causal=True,
            return_lse=False,
        ),
        tuple[Tensor, Tensor | None],
    )  # fmt: skip
    assert_type(cudnn_batch_decode_with_kv_cache(x, x, x, 1.0, x, max_sequence_kv=1), Tensor)
    assert_type(
        cudnn_batch_decode_with_kv_cache(x, x, x, 1.0, x, max_sequence_kv=1, return_lse=True), Pair
    )
    assert_type(fmha_varlen(x, x, x, x, x), tuple[Tensor, Tensor | None])
    assert_type(fmha_varlen(x, x, x, x, x, return_lse=True), Pair)
    assert_type(
        trtllm_fmha_v2_prefill((x, x), "CONTIGUOUS_Q_KV", x, x, 1, 1, 1.0, 1.0, 1, x, x), Tensor
    )
    assert_type(
        trtllm_fmha_v2_prefill(
            (x, x), "CONTIGUOUS_Q_KV", x, x, 1, 1, 1.0, 1.0, 1, x, x, save_softmax_stats=True
        ),
        Pair,
    )
    assert_type(trtllm_batch_context_with_kv_cache(x, kv, x, x, x, 1, 1, 1.0, 1.0, 1, x, x), Tensor)
    assert_type(trtllm_batch_decode_with_kv_cache(x, kv, x, x, x, 1, return_lse=True), Pair)


def refused(w: preflash.BatchPrefillWithPagedKVCacheWrapper, q: Tensor, kv: Pair) -> None:
    """Checkers report every comment here that ignores no error."""
    w.run(q, kv, return_lsee=True)  # type: ignore[call-overload]
    w.plan(q, q, q, q, 32, 8, 128, 16, casual=True)  # type: ignore[call-arg]
    w.plan(q, q, q, q, 32, 8, 128)  # type: ignore[call-arg]
    w.run(q, kv, return_lse=True).flatten(1)  # type: ignore[attr-defined]
    preflash.single_decode_with_kv_cache(q, q, q, casual=True)  # type: ignore[call-overload]
