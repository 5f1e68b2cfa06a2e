"""Batch prefill and decode under cuDNN's calling convention, on cuDNN or on the kernels of this
package."""

# The function is over 80 lines because the API fixes a long signature.

from __future__ import annotations

from types import SimpleNamespace

import torch

from ._check import values as check
from ._cudnn import execution
from ._cudnn.call import checked
from ._cudnn.graph import RefusedError
from ._device import backends
from ._fmha import direct
from ._wrap import cudnn_kernels

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]


@check.eager
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: str | torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a batch of requests over a ragged or paged KV cache; see preflash.prefill for
    the definition.

    Runs cuDNN where the nvidia-cudnn-frontend package imports and cuDNN has a kernel for the call:
    CUDA tensors, float16 or bfloat16, head_dim 128, or 192 for q and k with 128 for v. The first
    call with new strides, heads or scale, or with a batch size or maximum beyond the power of two
    above those before, builds a graph (up to a second), which is kept.
    Elsewhere, or where backend asks for it, the kernels of this package: same results.

    With pages cuDNN runs for backend="cudnn" alone. It multiplies what lies in the rest of a
    request's last page by 0, so that NaN or infinity there (of memory that was never written)
    reaches the output; the kernels of this package do not read it.

    Index arrays are int32 or int64, on the CPU or on q's device, of shape [n] or [n, 1, 1, 1].

    Args:
        q: [tokens, num_qo_heads, head_dim], requests where batch_offsets_q says.
        k_cache, v_cache: with block_tables [pages, num_kv_heads, page_size, head_dim], any strides
            but the last; without [tokens, num_kv_heads, head_dim].
        scale: factor of the logits; of cuDNN's graph it is a part.
        workspace_buffer: scratch memory on q's device, any dtype; 128 MB is plenty.
        max_token_per_sequence, max_sequence_kv: no request is longer; those on the GPU are compared
            only with PREFLASH_DEBUG=1 in the environment, because it takes a wait.
        actual_seq_lens_q, actual_seq_lens_kv: [batch_size], lengths of the requests. May be left
            out where batch_offsets_q and batch_offsets_k of batch_size + 1 tokens tell them.
        block_tables: [batch_size, pages] int32, the pages of each request.
        causal: keep keys up to the diagonal that ends at the last key.
        return_lse: also return the log-sum-exp.
        q_scale, k_scale, v_scale: floats or one-element tensors. q_scale and k_scale multiply the
            logits, v_scale the output.
        batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v: [batch_size + 1] (or
            [batch_size]), where each request begins in q, the output, k and v. Needed with more
            than one request; k's and v's are for ragged keys. In tokens, o's and v's default to
            q's and k's.
        batch_offsets_stats: the same for lse, whose requests else are padded to
            max_token_per_sequence.
        batch_offsets_units: "elements" (tokens times heads times head_dim, of lse tokens times
            heads; what the strides say where they say otherwise) or "tokens".
        out: [tokens, num_qo_heads, head_dim of v] to write into.
        lse: float32 to write into, contiguous: [batch_size, max_token_per_sequence, num_qo_heads],
            with batch_offsets_stats also [tokens, num_qo_heads]. Written also without return_lse.
        is_cuda_graph_compatible: nothing is read on the host, so that a CUDA graph that captured
            the call computes what its arrays hold at replay. All of them must be on the GPU, and
            cuDNN must serve the call.
        backend: None or "auto", "cudnn", "fa2", "fa3" or "cpu". An explicit one never becomes
            another.
        o_data_type: as in single_prefill_with_kv_cache.
        lse_base: "log2" or "ln".

    Returns:
        (out, lse), lse None without return_lse. lse is [batch_size, max_token_per_sequence,
        num_qo_heads] float32, -inf behind the last token of a request; with batch_offsets_stats
        the requests lie in that memory where the offsets say.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched.
        NotImplementedError: cuDNN was asked for and is not there or has no kernel for the call, or
            nothing serves it; the message says why.
    """
    a = SimpleNamespace(**locals())
    name = backends.requested("auto" if backend is None else backend, with_cudnn=True).name
    call = checked(a)
    why_not_cudnn = f"backend={name!r} is not cuDNN"
    if name in ("auto", backends.CUDNN):
        try:
            return execution.attend(call, explicit=name == backends.CUDNN)
        except RefusedError as refusal:
            why_not_cudnn = str(refusal)
    if name == backends.CUDNN:
        raise NotImplementedError(
            f"backend='cudnn': {why_not_cudnn}; backend='auto' computes it with other kernels"
        )
    return cudnn_kernels.attend(call, name, why_not_cudnn)


@check.eager
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: None = None,
    batch_offsets_v: None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or a few queries per request over a paged KV cache, on the kernels of this
    package: cuDNN lets NaN in the rest of a request's last page reach the output.

    Lengths on the GPU are not waited for, and such a call can be captured into a CUDA graph, as in
    trtllm_fmha_v2_prefill; keys are then not split over the machine.

    Args:
        q: [batch_size * q_len_per_req, num_qo_heads, head_dim], the rows of a request one after the
            other.
        k_cache, v_cache, scale, workspace_buffer, max_sequence_kv, actual_seq_lens_kv,
        block_tables: as in cudnn_batch_prefill_with_kv_cache, in pages.
        is_cuda_graph_compatible: either value promises the same.
        batch_offsets_q, batch_offsets_o: where each request begins in q and out, in elements: one
            after the other. Those on the GPU are compared only with PREFLASH_DEBUG=1 in the
            environment, because it takes a wait.
        batch_offsets_k, batch_offsets_v: None only; pages have none.
        out: of q's shape, with the head_dim of v_cache, to write into.
        return_lse, lse: base 2, float32 [batch_size * q_len_per_req, num_qo_heads].
        q_len_per_req: queries of each request, which are causal among themselves.
        window_left: how many keys left of the diagonal are kept; -1 is all.
        sinks: float32 [num_qo_heads], as in single_prefill_with_kv_cache.
        backend: None or "auto", "fa2", "fa3" or "cpu".

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        What trtllm_fmha_v2_prefill raises.
    """
    given = dict(locals())
    check.absent(batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
    check.flag("is_cuda_graph_compatible", is_cuda_graph_compatible)
    lengths = direct.lengths_of("actual_seq_lens_kv", actual_seq_lens_kv)
    each = check.integer("q_len_per_req", q_len_per_req, at_least=1)
    if check.is_tensor("q", q).dim() != 3 or q.shape[0] != lengths.numel() * each:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; must be [batch_size * q_len_per_req, num_qo_heads, "
            f"head_dim], with {lengths.numel() * each} rows"
        )
    begins = direct.uniform_indptr(lengths.numel(), each, lengths)
    out_dim = check.is_tensor("v_cache", v_cache).shape[-1]
    for name, offsets, rows, head_dim in (
        ("batch_offsets_q", batch_offsets_q, q, q.shape[2]),
        ("batch_offsets_o", batch_offsets_o, out, out_dim),
    ):
        if offsets is not None:
            strided = rows is not None and q.shape[0] > 1
            of_row = check.is_tensor("out", rows).stride(0) if strided else q.shape[1] * head_dim
            direct.check_one_after_the_other(name, offsets, begins, of_row)
    cache, layout = direct.paged("k_cache", (k_cache, v_cache), "HND")
    return direct.attend(
        {
            "qkv": "q, k_cache, v_cache",
            "k": "k_cache",
            "v": "v_cache",
            "seq_lens": "actual_seq_lens_kv",
            "max_kv_len": "max_sequence_kv",
            "bmm1_scale": "scale",
        },
        given,
        causal=True,
        qkv=(q, cache),
        input_layout=layout,
        seq_lens=lengths,
        max_q_len=each,
        max_kv_len=max_sequence_kv,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        batch_size=lengths.numel(),
        cum_seq_lens_q=begins,
        backend="auto" if backend is None else backend,
    )
