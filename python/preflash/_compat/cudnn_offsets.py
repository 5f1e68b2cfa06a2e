"""plan() of backend="cudnn" as FlashInfer's own callers write it: offsets in elements."""

from __future__ import annotations

from typing import Any

import torch

from .. import _core
from .._check import values as check
from .._check.arguments import converted
from .._check.calls import BatchArguments, PagedPlanArguments


def in_tokens(
    a: BatchArguments, options: _core.AttentionOptions, kv_layout: str, device: torch.device
) -> tuple[BatchArguments, str]:
    """The arguments with offsets in tokens, and the layout of the cache.

    Beside seq_lens_q, which tells the two apart, qo_indptr may count elements, tokens * heads *
    head_dim, as cuDNN reads it; ragged kv_indptr, too, beside seq_lens. A paged cache is then
    [pages, num_kv_heads, page_size, head_dim], whatever kv_layout says, as in
    cudnn_batch_prefill_with_kv_cache.
    """
    per_query = options.num_qo_heads * options.head_dim_qk
    found = {"qo_indptr": _tokens("qo_indptr", a.qo_indptr, a.seq_lens_q, per_query, device)}
    if not isinstance(a, PagedPlanArguments):
        per_key = options.num_kv_heads * options.head_dim_qk
        found["kv_indptr"] = _tokens("kv_indptr", a.kv_indptr, a.seq_lens, per_key, device)
    elif found["qo_indptr"] is not None:
        kv_layout = "HND"
    given = {name: value for name, value in found.items() if value is not None}
    return (converted(a, type(a), **given) if given else a), kv_layout


def _tokens(
    name: str, indptr: Any, lengths: Any, width: int, device: torch.device
) -> torch.Tensor | None:
    """The offsets in tokens, on the CPU; None where they are already, or nothing says. The checks
    of plan() say what is wrong with them."""
    if not isinstance(lengths, torch.Tensor) or width == 1:
        return None
    begins = check.index_array(name, indptr, device).cpu().to(torch.int64)
    name = "seq_lens_q" if name == "qo_indptr" else "seq_lens"
    lengths = check.tensor(name, lengths).reshape(-1).cpu().to(torch.int64)
    if begins.numel() != lengths.numel() + 1 or not begins.diff().equal(lengths * width):
        return None
    if begins.diff().equal(lengths) or int(begins[0]) % width:
        return None  # no tokens at all, or no whole one
    return (begins // width).to(torch.int32)
