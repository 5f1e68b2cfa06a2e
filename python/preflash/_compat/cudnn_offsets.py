"""backend="cudnn" of the batch wrappers: plan() with offsets in elements."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import _core
from .._check import validate
from .._check.calls import BatchArguments, PagedPlanArguments


def to_tokens(
    a: BatchArguments,
    options: _core.AttentionOptions,
    device: torch.device,
    buffers: Mapping[str, torch.Tensor],
) -> bool:
    """Converts qo_indptr from elements, tokens * heads * head_dim, where seq_lens_q shows that it
    counts them; ragged kv_indptr likewise, with seq_lens. Returns True for a paged cache whose
    layout is then [pages, num_kv_heads, page_size, head_dim], whatever kv_layout is.

    buffers: those of CUDA graphs that plan() fills, by the names of its arguments."""
    widths = {"qo_indptr": ("seq_lens_q", options.num_qo_heads * options.head_dim_qk)}
    paged, before = isinstance(a, PagedPlanArguments), a.qo_indptr
    if not paged:
        widths["kv_indptr"] = ("seq_lens", options.num_kv_heads * options.head_dim_qk)
    for name, (lengths_name, width) in widths.items():
        lengths = getattr(a, lengths_name)
        if not isinstance(lengths, torch.Tensor) or width == 1:
            continue  # the checks of plan() say what is wrong
        begins = validate.conforms(name, getattr(a, name), "indptr", device).cpu().to(torch.int64)
        lengths = validate.tensor(lengths_name, lengths).reshape(-1).cpu().to(torch.int64)
        fits = begins.numel() == lengths.numel() + 1 and begins.diff().equal(lengths * width)
        if fits and bool(lengths.any()) and int(begins[0]) % width == 0:
            if name in buffers and getattr(a, name).data_ptr() == buffers[name].data_ptr():
                raise ValueError(
                    f"{name} counts elements and is {name}_buf, which plan() fills with tokens: "
                    "give it another array"
                )
            setattr(a, name, (begins // width).to(torch.int32))
    return paged and a.qo_indptr is not before
