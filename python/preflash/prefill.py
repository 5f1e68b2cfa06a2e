"""Prefill and append attention: one request, or a batch over a paged or ragged KV cache.

For one request with query length L and key length S, row i and key j, D = S - L, and query head h
reading KV head h // (num_qo_heads / num_kv_heads):

    logits[i, j] = sm_scale * <q[i], k[j]>, soft-capped and biased if asked, -inf where masked
                   (with RoPE, of q[i] rotated by position D + i and k[j] rotated by position j)
    out[i]       = softmax(logits[i]) @ v        (exactly 0 where nothing is kept)
    lse[i]       = log2(sum_j exp(logits[i, j])) (exactly -inf where nothing is kept)

`causal` keeps j <= i + D, `window_left` = w >= 0 keeps j >= i + D - w, a custom mask keeps what is
True. A logit of 9.3e7 or more in size may make its row NaN on fa3, output and LSE; other backends
compute it. The result is computed tile by tile without ever storing the logits (FlashAttention-2,
arXiv:2307.08691); a KV cache in pages follows PagedAttention (arXiv:2309.06180); long keys are
split over the machine and merged.

Inside torch.compile every call is one operator of the graph. plan() stays outside, and a compiled
function sees each new one without being compiled again.
"""

from __future__ import annotations

from ._check.arguments import Result
from ._check.calls import SingleArguments
from ._compat.signatures import function_takes
from ._wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from ._wrappers.ragged import BatchPrefillWithRaggedKVCacheWrapper
from ._wrappers.single import attention_of_one
from .cudnn import cudnn_batch_prefill_with_kv_cache
from .fmha_v2 import fmha_varlen, trtllm_fmha_v2_prefill
from .trtllm import trtllm_batch_context_with_kv_cache

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
]


@function_takes(SingleArguments)
def single_prefill_with_kv_cache(a: SingleArguments) -> Result:
    """Attention of one request; see this module for the definition.

    Args:
        q: [qo_len, num_qo_heads, head_dim], float16, bfloat16, float8_e4m3fn or float8_e5m2 (which
            is converted to the output's dtype), on the CPU also float32. head_dim is a multiple of
            8 up to 512; rows lie multiples of 16 bytes apart.
        k: [kv_len, num_kv_heads, head_dim] with kv_layout "NHD", [num_kv_heads, kv_len, head_dim]
            with "HND"; q's dtype, or under wider or float8_e5m2 queries float8_e4m3fn or
            float8_e5m2. At most 2^30 keys. Only the last dimension must be contiguous; rows lie
            multiples of 16 bytes apart: a head_dim of 72 in 8 bits needs rows of 80 bytes.
        v: like k, of its dtype; its head_dim may differ where q has 192 and v 128.
        custom_mask: [qo_len, kv_len] bool, or flat and maybe longer; True keeps. Of uint8, int8,
            int16, int32 or int64, all but 0 keeps.
        packed_custom_mask: uint8, ceil(qo_len * kv_len / 8) bytes in little bit order
            (`packbits(mask.flatten(), bitorder="little")`). Takes precedence over custom_mask.
        causal: keep keys up to the diagonal that ends at the last key. Ignored with a custom mask.
        pos_encoding_mode: "NONE", or "ALIBI": slope(h) * (j - i) is added to logits[i, j] of query
            head h, after the soft cap, with the slopes of ALiBi (arXiv:2108.12409) for any number
            of heads. "ROPE_LLAMA": dimensions d and d + head_dim/2 of every row of q and k are
            rotated by position / rope_scale * rope_theta^(-2d/head_dim) radians (RoPE,
            arXiv:2104.09864); query i has position kv_len - qo_len + i, key j position j. The
            cache holds keys that are not rotated. On a GPU RoPE may turn float16 keys beyond 46000
            to infinity.
        allow_fp16_qk_reduction, use_fp16_qk_reduction: a permission; sums are float32 all the same.
        q_quantization: "row" lets kernels round 16-bit queries over float8_e4m3fn keys to
            float8_e4m3fn, each row times a power of two of its own, and multiply in 8 bits: fa3
            does, at head_dim 72 to 128, where it multiplies 8-bit queries. Other kernels, and all
            with "none", take queries as they are. docs/performance.md has the errors.
            PREFLASH_Q_QUANTIZATION=row in the environment, read at import, sets it for every plan()
            and single call.
        sm_scale: factor of the logits, 1/sqrt(head_dim) by default. With q_scale and k_scale
            folded in, at most 2.358e38 in size; with ALiBi 0 or at least 1e-30.
        window_left: how many keys left of the diagonal are kept; -1 is all.
        logits_soft_cap: c > 0 turns logits x into c * tanh(x / c), 1e-6 to 1e30; None, 0 or less is
            off.
        rope_scale, rope_theta: positive floats, 1 and 10000 by default; others with "ROPE_LLAMA"
            only. No position may turn a row by more than 1024 radians.
        return_lse: also return the log-sum-exp.
        backend: "auto", "fa2", "fa3" or "cpu".
        out: [qo_len, num_qo_heads, head_dim of v] to write into, of o_dtype.
        lse: float32 to write into, in the shape that lse_layout says; written also without
            return_lse.
        lse_base: "log2" or "ln".
        lse_layout: "NH" for [qo_len, num_qo_heads], "HN" for [num_qo_heads, qo_len].
        q_scale, k_scale, v_scale: floats or one-element tensors (one on the GPU costs a wait for
            it). q_scale and k_scale multiply the logits, v_scale the output.
        enable_pdl: a permission; launches do not depend on one another's early end.
        scale_q, scale_k, scale_v: float32 [num_qo_heads], [num_kv_heads], [num_kv_heads]: factors
            of the heads of an fp8 q, k and v, beside q_scale, k_scale and v_scale.
        kv_cache_sf: None only.
        sinks: float32 [num_qo_heads]: to every row of query head h one more logit, sinks[h], which
            has no value and which sm_scale does not multiply. It takes its part of the softmax
            and of lse, also in a row that keeps no key; -inf is as if it were not there.
        o_dtype, o_data_type: of the output, q's dtype. With 8-bit queries bfloat16 by default, or
            float16, or with float8_e4m3fn queries that, in which 448 stands for all that is larger.

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched.
        NotImplementedError: no compiled kernel serves it, or an option of a later release.
    """
    return attention_of_one(a)


@function_takes(SingleArguments, return_lse=True)
def single_prefill_with_kv_cache_return_lse(a: SingleArguments) -> Result:
    """single_prefill_with_kv_cache with return_lse=True: returns (out, lse).

    Takes the same arguments and raises the same errors.
    """
    return attention_of_one(a)
