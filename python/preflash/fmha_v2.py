"""TensorRT-LLM's call for prefill attention, preflash.prefill.trtllm_fmha_v2_prefill, and
fmha_varlen, a plain one."""

# The function is over 80 lines because the API fixes a long signature; its body is short.

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from ._check import torch_modes, validate
from ._fmha import arguments, direct, run
from ._fmha.arguments import Qkv

__all__ = ["fmha_varlen", "trtllm_fmha_v2_prefill"]

_VARLEN_BYTES = 32 * 1024 * 1024


@torch_modes.eager
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
            With pools apart, [batch_size, 2, pages] too, where [:, 1] counts the same pages of v
            from the beginning of k, v's pool being whole pages behind it.
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
            for plain logits, and 8-bit tensors are converted to 16 bits for it, which takes memory
            for the keys and values of all requests.
        backend: "auto", "fa2", "fa3" or "cpu".

    Returns:
        out, or (out, stats) with save_softmax_stats. Rows of no request are 0 in an out that the
        call allocates, untouched in the caller's, and -inf and 0 in stats.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched.
        NotImplementedError: no compiled kernel serves it.
        RuntimeError: the call needs a plan while its stream is being captured.
    """
    a = SimpleNamespace(**locals(), lse=None, return_lse=False, mixed=False, draft_mask=None)
    torch_modes.not_traced()
    return run.run(arguments.checked(a))


@torch_modes.eager
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor,
    plan_info: None = None,
    max_qo_len: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    o_scale: None = None,
    return_lse: bool = False,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a batch of requests, of one tensor each of queries, keys and values, without
    plan().

    With max_qo_len, offsets on the GPU are not waited for, as in trtllm_fmha_v2_prefill; without it
    they are read.

    Args:
        q: [tokens, num_qo_heads, head_dim].
        k, v: [kv tokens, num_kv_heads, head_dim].
        qo_segment_offsets, kv_segment_offsets: [batch_size + 1] int32, first row of each request.
        plan_info: None only; the call plans by itself.
        max_qo_len: no request has more queries.
        out: [tokens, num_qo_heads, head_dim of v] to write into.
        lse: [tokens, num_qo_heads] float32 to write into; written also without return_lse.
        causal: keep keys up to the diagonal that ends at the last key.
        sm_scale: factor of the logits, 1/sqrt(head_dim) by default.
        q_scale, k_scale, v_scale: floats or one-element tensors. q_scale and k_scale multiply the
            logits, v_scale the output.
        o_scale: None or 1 only.
        backend: "auto", "fa2", "fa3" or "cpu".

    Returns:
        (out, lse), always two: lse is base 2, and None where it is not asked for. 8-bit queries
        give bfloat16 where out does not say otherwise.

    Raises:
        What trtllm_fmha_v2_prefill raises; NotImplementedError also for one of the options above.
    """
    given = dict(locals())
    validate.absent(plan_info=plan_info)
    validate.neutral("o_scale", o_scale, 1.0)
    for name, value in (("q", q), ("k", k), ("v", v)):
        validate.conforms(name, value, "single_tensor")
    offsets, known = [], {"batch_size + 1": 1}
    for name, rule in (("qo_segment_offsets", "first_offsets"), ("kv_segment_offsets", "indptr")):
        offsets.append(validate.conforms(name, given[name], rule, q.device, known))
        known = {"batch_size + 1": offsets[0].numel()}
    if max_qo_len is None:
        offsets = [value.cpu() for value in offsets]
        max_qo_len = max([0, *offsets[0].diff().tolist()])
    logits = 1.0 / math.sqrt(max(q.shape[2], 1)) if sm_scale is None else 1.0
    for name in ("sm_scale", "q_scale", "k_scale"):
        if given[name] is not None:
            logits *= validate.scale(name, given[name])
    result = direct.attend(
        {
            "qkv": "q, k, v",
            "cum_seq_lens_q": "qo_segment_offsets",
            "cum_seq_lens_kv": "kv_segment_offsets",
            "seq_lens": "kv_segment_offsets",
            "max_q_len": "max_qo_len",
            "bmm1_scale": "sm_scale",
            "bmm2_scale": "v_scale",
        },
        given,
        causal=validate.flag("causal", causal),
        qkv=(q, k, v),
        input_layout="SEPARATE_Q_K_V",
        workspace_buffer=torch.empty(_VARLEN_BYTES, dtype=torch.uint8, device=q.device),
        seq_lens=offsets[1].diff(),
        max_q_len=max_qo_len,
        max_kv_len=k.shape[0],
        bmm1_scale=logits,
        bmm2_scale=1.0 if v_scale is None else v_scale,
        batch_size=offsets[0].numel() - 1,
        cum_seq_lens_q=offsets[0],
        cum_seq_lens_kv=offsets[1],
        out_dtype=torch.bfloat16 if q.dtype.itemsize == 1 and out is None else None,
    )
    return result if isinstance(result, tuple) else (result, lse)
