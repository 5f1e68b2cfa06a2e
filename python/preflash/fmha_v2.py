"""TensorRT-LLM's call for prefill attention, preflash.prefill.trtllm_fmha_v2_prefill."""

# NOTE: the API fixes a long signature, so the function is over 80 lines. Its body is short: check,
# convert and hand over.

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._check import values as check
from ._check.arguments import PerHead
from ._fmha import arguments, run
from ._fmha import lengths as _lengths
from ._fmha.arguments import FmhaArguments
from ._fmha.operands import Qkv, one_tensor

__all__ = ["trtllm_fmha_v2_prefill"]


@check.eager
def trtllm_fmha_v2_prefill(
    qkv: Qkv,
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
    *,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch in one call, without plan().

    Of request i with L queries and S keys, row r stands at position p = S - L + r:

        logits[r, j] = bmm1_scale * <q[r], k[j]>, soft-capped to c * tanh(logits / c) if asked, plus
                       slope * j with ALiBi, -inf where masked
        out[r]       = bmm2_scale * softmax(logits[r]) @ v

    Where the lengths are on the GPU the host does not wait for them: work is planned once for
    max_q_len and max_kv_len and kept, each call puts the lengths into the plan on the device, and
    keys are not split. Such a call can be captured into a CUDA graph once it has been made before,
    on the stream of the capture. What they hold is checked with PREFLASH_DEBUG=1 alone; otherwise
    what reaches beyond max_q_len, max_kv_len or the tensors is cut off. Lengths on the CPU are
    checked, and planned for exactly, by every call.

    Args:
        qkv: float16, bfloat16 or float8_e4m3fn, on the CPU also float32, with a head_dim that is a
            multiple of 8; as input_layout says. Only the last dimension must be contiguous.
        input_layout: "PACKED_QKV": one tensor [tokens, 3, num_heads, head_dim].
            "CONTIGUOUS_Q_KV": (q [tokens, num_heads, head_dim], kv [kv tokens, 2, num_kv_heads,
            head_dim]). "SEPARATE_Q_K_V": (q, k, v), each [tokens, heads, head_dim].
            "Q_PAGED_KV_NHD": (q, kv [pages, 2, page_size, num_kv_heads, head_dim]).
            "Q_PAGED_KV_HND": (q, kv [pages, 2, num_kv_heads, page_size, head_dim]). Pools may also
            be given apart, as (q, (k, v)) or (q, k, v), without the dimension of 2.
        workspace_buffer: scratch memory on q's device, of any dtype; with less, keys are split
            less. Nothing is expected of its contents.
        seq_lens: int32 [batch_size], keys of each request.
        max_q_len, max_kv_len: no request has more queries, or keys.
        bmm1_scale, bmm2_scale: floats, or one-element tensors (one on a GPU costs a wait for it).
        batch_size: the number of requests.
        cum_seq_lens_q: int32 [batch_size + 1], first row of each request in q. May start above 0.
        cum_seq_lens_kv: int32 [batch_size + 1], the same of k and v. With pages it says no more
            than seq_lens, and may be None.
        block_tables: int32 [batch_size, pages of the longest request], the pages of each request;
            with pages only. Those of max_kv_len keys count, and may be fewer than it would need.
        out: [tokens, num_heads, head_dim of v] to write into.
        out_dtype: float16, bfloat16 or float8_e4m3fn (448 stands for all that is larger), also as
            "fp16", "bf16" and "fp8"; by default that of out, or of q. What 16-bit queries do not
            give themselves is converted.
        sinks: float32 [num_heads], or a list that holds one such tensor: one more logit of every
            row of a head, which has no value.
        pos_encoding_mode: None, or "alibi": the slopes of ALiBi (arXiv:2108.12409) times the key.
        logits_soft_cap_scale: c; None or 0 is off.
        mask_mode: in letters of either case. "causal": row r keeps j <= p. "sliding_window": of
            those, j >= p - window_left. "chunked": of those, j of p's own chunk of
            chunked_attention_size positions, a power of two. "padding": all of the request.
        window_left, chunked_attention_size: only effective in their modes. -1 is no window.
        save_softmax_stats: also return float32 [tokens, num_heads, 2]. [..., 0]: the largest kept
            <q, k>, or soft-capped logit, divided by sqrt(head_dim); ALiBi's bias counts as it does
            among the logits. [..., 1]: the sum of exp(logit - largest logit). Without sinks; -inf
            and 0 in a row that keeps no key. Needs bmm1_scale > 0.
        skip_softmax_threshold_scale_factor: f > 0 leaves out tiles of keys whose every logit l has
            exp(l - maximum so far) < min(f / seq_lens[i], 1), of every row that is computed
            together: neither their exponentials nor their products with v are computed. On a GPU
            for plain logits of 16-bit tensors.
        backend: "auto", "fa2", "fa3" or "cpu".

    Returns:
        out, or (out, stats) with save_softmax_stats. Rows that no request has are not written.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched.
        NotImplementedError: no compiled kernel serves it.
        RuntimeError: the call needs a plan while its stream is being captured.
    """
    a = FmhaArguments(
        qkv, input_layout, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale,
        bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv, block_tables, out, out_dtype,
        PerHead(sinks=one_tensor("sinks", sinks)), pos_encoding_mode, logits_soft_cap_scale,
        mask_mode, window_left, chunked_attention_size, save_softmax_stats,
        skip_softmax_threshold_scale_factor, backend,
    )  # fmt: skip
    check.not_traced()
    call = arguments.checked(a)
    lengths = _lengths.checked(a, call)
    return run.run(call, lengths)
