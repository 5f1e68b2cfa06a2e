"""Calls whose arguments have other names than those of trtllm_fmha_v2_prefill."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from .._check import torch_modes, validate
from .._check.arguments import Result
from .._check.names import renamed
from .._check.pages import may_be_read
from . import arguments, run

# What calls say that lack a parameter of trtllm_fmha_v2_prefill.
_UNSAID = {
    **dict.fromkeys(("cum_seq_lens_kv", "block_tables", "out_dtype", "sinks", "window_left")),
    **dict.fromkeys(("pos_encoding_mode", "logits_soft_cap_scale")),
    "chunked_attention_size": 0,
    "save_softmax_stats": False,
    "skip_softmax_threshold_scale_factor": None,
    "draft_mask": None,
}


def attend(
    names: Mapping[str, str], given: Mapping[str, Any], *, causal: bool, **changed: Any
) -> Result:
    """given: the caller's arguments by name, of which those count that trtllm_fmha_v2_prefill has,
    lse and return_lse; changed: those that it has converted or calls otherwise. names: what it
    calls them, which errors name."""
    torch_modes.not_traced()
    a = SimpleNamespace(**{**_UNSAID, **given, **changed, "mixed": True})
    a.window_left = -1 if a.window_left is None else a.window_left
    with renamed(names):
        windowed = validate.window_left("window_left", a.window_left) >= 0
        a.mask_mode = "sliding_window" if windowed else "causal" if causal else "padding"
        return run.run(arguments.checked(a))


def paged(name: str, kv_cache: Any, kv_layout: Any) -> tuple[Any, str]:
    """A cache and its input_layout. One tensor may hold keys that are values."""
    validate.one_of("kv_layout", kv_layout, validate.KV_LAYOUTS)
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        keys = validate.tensor(name, kv_cache)[:, 0]
        kv_cache = (keys, keys)
    elif isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
        kv_cache = tuple(kv_cache)
    elif not isinstance(kv_cache, torch.Tensor):
        raise TypeError(f"{name} must be a tensor or a tuple of two; got {type(kv_cache).__name__}")
    return kv_cache, f"Q_PAGED_KV_{kv_layout}"


def paged_by_tables(
    name: str, kv_cache: Any, kv_layout: Any, block_tables: Any, seq_lens: torch.Tensor, shared: Any
) -> tuple[Any, str, Any]:
    """paged(), and block tables [batch_size, pages] that serve k and v. Where they are not shared,
    [batch_size, 2, pages], a request's pages of v are to be its pages of k plus one number, by
    which one of the pools is then moved; to find it tables on the GPU are waited for."""
    cache, layout = paged(name, kv_cache, kv_layout)
    shared = validate.flag("uses_shared_paged_kv_idx", shared)
    validate.conforms(
        "block_tables", block_tables, "shared_tables" if shared else "tables_of_k_and_v"
    )
    if shared:
        return cache, layout, block_tables
    if block_tables.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "uses_shared_paged_kv_idx=False: block_tables are read on the host, which a capture "
            "does not allow; give tables [batch_size, pages]"
        )
    k, v = cache if isinstance(cache, tuple) else validate.tensor(name, cache).unbind(1)
    for pool in (validate.is_tensor("k", k), validate.is_tensor("v", v)):
        if pool.dim() != 4:
            raise ValueError(f"{name} has a pool of shape {tuple(pool.shape)}; must have 4 dims")
    page_size = max(k.shape[1 if kv_layout == "NHD" else 2], 1)
    if block_tables.shape[:2] != (seq_lens.numel(), 2):
        raise ValueError(
            f"block_tables has shape {tuple(block_tables.shape)}; must be [{seq_lens.numel()}, 2, "
            "pages]"
        )
    of_k, of_v = block_tables.unbind(1)
    held = -(-seq_lens.to(of_k.device) // page_size)
    used = torch.arange(of_k.shape[1], device=of_k.device) < held[:, None]
    apart = (of_v - of_k)[used].unique().tolist()
    if len(apart) > 1:
        raise NotImplementedError(
            "block_tables[:, 1] - block_tables[:, 0] takes several values; the kernels have one "
            "page index for k and v, so it must be one number"
        )
    move = apart[0] if apart else 0
    k, v = k[max(-move, 0) :], v[max(move, 0) :]
    pages = min(len(k), len(v))
    return (k[:pages], v[:pages]), layout, of_k if move >= 0 else of_v


def lengths_of(name: str, value: Any) -> torch.Tensor:
    """int32 [batch_size], of an integer dtype and with dimensions of 1 behind it."""
    value = validate.tensor(name, value)
    if value.dim() == 0 or value.numel() != value.shape[0]:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be [batch_size]")
    value = value.reshape(-1)
    if value.dtype == torch.uint32:
        return value.view(torch.int32)
    if value.dtype == torch.int64:  # what int32 does not hold is refused, or cut off, as any other
        return value.clamp(-1, 2**31 - 1).to(torch.int32)
    return value


def uniform_indptr(batch_size: int, each: int, like: torch.Tensor) -> torch.Tensor:
    """First rows of requests that have `each`, where `like` is."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=like.device) * each


def check_one_after_the_other(name: str, offsets: Any, begins: torch.Tensor, of_row: int) -> None:
    """Offsets of requests, in elements; those on the GPU are not read to compare.

    begins: [batch_size + 1], their rows. of_row: elements from one row to the next."""
    offsets = validate.tensor(name, offsets).reshape(-1)
    validate.conforms(name, offsets, "wide_offsets", begins.device)
    count = begins.numel() - 1
    if offsets.numel() not in (count, count + 1):
        raise ValueError(f"{name} has {offsets.numel()} elements; must have {count} or {count + 1}")
    if not may_be_read(offsets):
        return
    wanted = begins.cpu().to(torch.int64)[: offsets.numel()] * of_row
    if not torch.equal(offsets.cpu().to(torch.int64), wanted):
        raise ValueError(
            f"{name}: requests must lie one after the other, {of_row} elements from row to row"
        )
