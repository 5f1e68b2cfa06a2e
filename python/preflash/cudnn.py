"""Batch prefill and decode under cuDNN's calling convention, on the kernels of this package."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ._check import torch_modes, validate
from ._fmha import cudnn, direct

__all__ = ["cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"]


@torch_modes.eager
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
    """Attention of a batch over a ragged or paged KV cache, as preflash.prefill defines it.

    Args: index arrays are int32 or int64, on the CPU or on q's device, [n] or [n, 1, 1, 1].
        q: [tokens, num_qo_heads, head_dim]. workspace_buffer: 128 MB of scratch memory are plenty.
        k_cache, v_cache: with block_tables [pages, num_kv_heads, page_size, head_dim], any strides
            but the last; without [tokens, num_kv_heads, head_dim].
        max_token_per_sequence, max_sequence_kv: upper bounds of the lengths.
        actual_seq_lens_q, actual_seq_lens_kv: [batch_size]. May be left out if batch_offsets_q and
            batch_offsets_k hold batch_size + 1 numbers of tokens.
        block_tables: [batch_size, pages] int32. causal: keep keys up to the last one's diagonal.
        q_scale, k_scale, v_scale: floats or one-element tensors. scale, q_scale and k_scale
            multiply the logits, v_scale the output.
        batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v: [batch_size + 1] (or
            [batch_size]), where each request begins in q, the output, k and v. Needed with more
            than one request; k's and v's only without block_tables. In tokens, o's and v's default
            to q's and k's. Requests in other places than one after the other are copied.
        batch_offsets_stats: the same for lse; None: requests padded to max_token_per_sequence.
        batch_offsets_units: "elements" (tokens times the stride of a token), or "tokens".
        out: [tokens, num_qo_heads, head_dim of v] to write into.
        lse: contiguous float32 to write into, of the shape that is returned, or with
            batch_offsets_stats [tokens, num_qo_heads]. Written without return_lse, too.
        is_cuda_graph_compatible: reads arrays on the GPU alone, so that a captured call reads them
            at replay; PREFLASH_DEBUG=1 checks the values. Scales must be floats, and ragged
            requests must lie one after the other, at the same tokens of k and v. No split-KV.
        backend: None, "auto" or "cudnn" (all three the same), "fa2", "fa3" or "cpu".
        o_data_type: as in single_prefill_with_kv_cache. lse_base: "log2" or "ln".

    Returns (out, lse), lse None without return_lse: [batch_size, max_token_per_sequence,
    num_qo_heads] float32, -inf in rows of no request.

    Raises:
        TypeError, ValueError: an argument is wrong. NotImplementedError: no kernel serves the call.
        RuntimeError: the stream is being captured without is_cuda_graph_compatible=True.
    """
    return cudnn.attend(SimpleNamespace(**locals()))


@torch_modes.eager
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
    """Attention of a few queries per request over a paged KV cache. With lengths on the GPU the
    call can be captured into a CUDA graph, as in trtllm_fmha_v2_prefill; keys are then not split.

    Args:
        q: [batch_size * q_len_per_req, num_qo_heads, head_dim], one request after the other.
        k_cache, v_cache, scale, workspace_buffer, max_sequence_kv, actual_seq_lens_kv,
        block_tables, out: as in cudnn_batch_prefill_with_kv_cache, in pages.
        is_cuda_graph_compatible: no effect. batch_offsets_k, batch_offsets_v: None only.
        batch_offsets_q, batch_offsets_o: where each request begins in q and out, in elements: one
            after the other. On the GPU compared only with PREFLASH_DEBUG=1.
        return_lse, lse: base 2, float32 [batch_size * q_len_per_req, num_qo_heads].
        q_len_per_req: queries of each request, which are causal among themselves.
        window_left, sinks: as in single_prefill_with_kv_cache.
        backend: None or "auto", "fa2", "fa3" or "cpu".

    Returns out, or (out, lse) with return_lse. Raises what trtllm_fmha_v2_prefill raises.
    """
    given = dict(locals())
    validate.absent(batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
    validate.flag("is_cuda_graph_compatible", is_cuda_graph_compatible)
    lengths = direct.lengths_of("actual_seq_lens_kv", actual_seq_lens_kv)
    each = validate.size("q_len_per_req", q_len_per_req)
    if validate.is_tensor("q", q).dim() != 3 or q.shape[0] != lengths.numel() * each:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; must be [batch_size * q_len_per_req, num_qo_heads, "
            f"head_dim], with {lengths.numel() * each} rows"
        )
    begins = direct.uniform_indptr(lengths.numel(), each, lengths)
    widths = (q.shape[2], validate.is_tensor("v_cache", v_cache).shape[-1])
    for name, rows, head_dim in zip("qo", (q, out), widths, strict=True):
        if (offsets := given[f"batch_offsets_{name}"]) is not None:
            strided = rows is not None and q.shape[0] > 1
            of_row = validate.is_tensor("out", rows).stride(0) if strided else q.shape[1] * head_dim
            direct.check_one_after_the_other(f"batch_offsets_{name}", offsets, begins, of_row)
    return direct.attend(
        cudnn.NAMES, given, causal=True, qkv=(q, (k_cache, v_cache)), max_q_len=each,
        input_layout="Q_PAGED_KV_HND", seq_lens=lengths, max_kv_len=max_sequence_kv,
        bmm1_scale=scale, bmm2_scale=1.0, batch_size=lengths.numel(), cum_seq_lens_q=begins,
        backend="auto" if backend is None else backend,
    )  # fmt: skip
