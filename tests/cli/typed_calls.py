"""Asserts the types that a checker must see of results: test_types.py gives this file to mypy and
pyright, and nothing runs it."""

from typing import Any

import preflash
import torch
from preflash.cudnn import cudnn_batch_prefill_with_kv_cache as cudnn
from preflash.fmha_v2 import fmha_varlen
from preflash.fmha_v2 import trtllm_fmha_v2_prefill as fmha
from preflash.trtllm import trtllm_batch_context_with_kv_cache as context
from preflash.trtllm import trtllm_batch_decode_with_kv_cache as trtllm_decode
from typing_extensions import assert_type

Tensor = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]
PairOrOne = tuple[torch.Tensor, torch.Tensor | None]
single = preflash.single_prefill_with_kv_cache


def batches(
    paged: preflash.BatchPrefillWithPagedKVCacheWrapper,
    ragged: preflash.BatchPrefillWithRaggedKVCacheWrapper,
    decode: preflash.BatchDecodeWithPagedKVCacheWrapper,
    q: Tensor, kv: Pair, unknown: bool, any_q: Any,
) -> None:  # fmt: skip
    assert_type(paged.run(q, kv), Tensor)
    assert_type(paged.run(any_q, kv), Tensor)
    assert_type(paged.run(q, kv, return_lse=False), Tensor)
    assert_type(paged.run(q, kv, return_lse=True), Pair)
    assert_type(paged.run(q, kv, 1.0, 1.0, True), Pair)
    assert_type(paged.run(q, kv, return_lse=unknown), Tensor | Pair)
    assert_type(paged.run(q, kv, None, None, unknown), Tensor | Pair)
    assert_type(paged.run_return_lse(q, kv, window_left=3), Pair)
    assert_type(paged.forward(q, kv, causal=True), Tensor)
    assert_type(paged.forward_return_lse(q, kv), Pair)
    assert_type(ragged.run(q, q, q), Tensor)
    assert_type(ragged.run(q, q, q, True), Pair)
    assert_type(ragged.run_return_lse(q, q, q, lse_base="ln"), Pair)
    assert_type(decode.run(q, kv, q_len_per_req=2, lse_layout="HN"), Tensor)
    assert_type(decode.run_return_lse(q, kv, q_len_per_req=2), Pair)


def pod(
    w: preflash.PODWithPagedKVCacheWrapper,
    both: preflash.BatchPODWithPagedKVCacheWrapper,
    q: Tensor, kv: Pair, unknown: bool,
) -> None:  # fmt: skip
    assert_type(w.run(q, q, q, q, kv, causal_p=True), Pair)
    assert_type(w.run(q, q, q, q, kv, return_lse_p=True), tuple[Pair, Tensor])
    assert_type(w.run(q, q, q, q, kv, return_lse_d=True), tuple[Tensor, Pair])
    assert_type(w.run(q, q, q, q, kv, return_lse_p=True, return_lse_d=True), tuple[Pair, Pair])
    assert_type(w.run(q, q, q, q, kv, return_lse_d=unknown), tuple[Tensor | Pair, Tensor | Pair])
    assert_type(w.run_return_lse(q, q, q, q, kv), tuple[Pair, Pair])
    assert_type(both.run(q, kv, q, kv), Pair)
    assert_type(both.run(q, kv, q, kv, return_lse=True), tuple[Pair, Pair])


def others(
    mixed: preflash.BatchAttention,
    levels: preflash.MultiLevelCascadeAttentionWrapper,
    x: Tensor, kv: Pair, unknown: bool,
) -> None:  # fmt: skip
    assert_type(mixed.run(x, kv), Pair)
    assert_type(levels.run(x, kv), Tensor)
    assert_type(single(x, x, x, causal=True), Tensor)
    assert_type(single(x, x, x, return_lse=True), Pair)
    assert_type(single(x, x, x, return_lse=unknown), Tensor | Pair)
    assert_type(preflash.single_prefill_with_kv_cache_return_lse(x, x, x), Pair)
    assert_type(
        cudnn(x, x, x, 1.0, x, max_token_per_sequence=1, max_sequence_kv=1, causal=True,
              return_lse=True), Pair,
    )  # fmt: skip
    assert_type(
        cudnn(x, x, x, 1.0, x, max_token_per_sequence=1, max_sequence_kv=1, causal=True,
              return_lse=False), PairOrOne,
    )  # fmt: skip
    assert_type(fmha_varlen(x, x, x, x, x), PairOrOne)
    assert_type(fmha_varlen(x, x, x, x, x, return_lse=True), Pair)
    scales_and_lengths = (1, 1, 1.0, 1.0, 1, x, x)
    form = "CONTIGUOUS_Q_KV"
    assert_type(fmha(kv, form, x, x, *scales_and_lengths), Tensor)
    assert_type(fmha(kv, form, x, x, *scales_and_lengths, save_softmax_stats=True), Pair)
    assert_type(context(x, kv, x, x, x, *scales_and_lengths), Tensor)
    assert_type(trtllm_decode(x, kv, x, x, x, 1, return_lse=True), Pair)


def refused(w: preflash.BatchPrefillWithPagedKVCacheWrapper, q: Tensor, kv: Pair) -> None:
    """Checkers report every comment here that ignores no error."""
    w.run(q, kv, return_lsee=True)  # type: ignore[call-overload]
    w.plan(q, q, q, q, 32, 8, 128, 16, casual=True)  # type: ignore[call-arg]
    w.plan(q, q, q, q, 32, 8, 128)  # type: ignore[call-arg]
    w.run(q, kv, return_lse=True).flatten(1)  # type: ignore[attr-defined]
    preflash.single_decode_with_kv_cache(q, q, q, casual=True)  # type: ignore[call-overload]
