"""Calls whose arguments have other names than those of trtllm_fmha_v2_prefill."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from .._check import values as check
from .._check.arguments import PerHead, Result
from . import arguments, run
from . import lengths as _lengths
from .arguments import FmhaArguments
from .operands import one_tensor


def attend(
    names: Mapping[str, str],
    *,
    causal: bool,
    window_left: Any = -1,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: Any = None,
    **a: Any,
) -> Result:
    """names: what the caller calls the arguments of FmhaArguments, which errors name."""
    check.not_traced()
    try:
        if window_left is None or check.window_left("window_left", window_left) < 0:
            mode = "causal" if causal else "padding"
        else:
            mode = "sliding_window"
        if skip_softmax_threshold_scale_factor is not None:
            a["skip_softmax_threshold_scale_factor"] = skip_softmax_threshold_scale_factor
        given = FmhaArguments(
            **a,
            per_head=PerHead(sinks=one_tensor("sinks", sinks)),
            mask_mode=mode,
            window_left=-1 if window_left is None else window_left,
            mixed=True,
        )
        call = arguments.checked(given)
        return run.run(call, _lengths.checked(given, call))
    except (TypeError, ValueError, NotImplementedError) as error:
        says = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        if says == str(error):
            raise
        raise type(error)(says) from None


def paged(name: str, kv_cache: Any, kv_layout: Any) -> tuple[Any, str]:
    """A cache and the layout it has in FmhaArguments. One tensor may hold keys that are values."""
    check.one_of("kv_layout", kv_layout, check.KV_LAYOUTS)
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = (kv_cache[:, 0], kv_cache[:, 0])
    elif isinstance(kv_cache, (tuple, list)):
        kv_cache = tuple(kv_cache)
    elif not isinstance(kv_cache, torch.Tensor):
        raise TypeError(f"{name} must be a tensor or a tuple of two; got {type(kv_cache).__name__}")
    return kv_cache, f"Q_PAGED_KV_{kv_layout}"


def lengths_of(name: str, value: Any) -> torch.Tensor:
    """int32 [batch_size], of an integer dtype and with dimensions of 1 behind it."""
    value = check.tensor(name, check.is_tensor(name, value))
    if value.dim() == 0 or value.numel() != value.shape[0]:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be [batch_size]")
    value = value.reshape(-1)
    if value.dtype == getattr(torch, "uint32", None):
        return value.view(torch.int32)
    return value.to(torch.int32) if value.dtype == torch.int64 else value


def uniform_indptr(batch_size: int, each: int, like: torch.Tensor) -> torch.Tensor:
    """First rows of requests that have `each`, where `like` is."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=like.device) * each


def check_one_after_the_other(name: str, offsets: Any, begins: torch.Tensor, of_row: int) -> None:
    """Offsets of requests, in elements; those on the GPU are not read to compare.

    begins: [batch_size + 1], their rows. of_row: elements from one row to the next."""
    offsets = check.tensor(name, check.is_tensor(name, offsets)).reshape(-1)
    count = begins.numel() - 1
    if offsets.numel() not in (count, count + 1):
        raise ValueError(f"{name} has {offsets.numel()} elements; must have {count} or {count + 1}")
    if not offsets.is_cpu and not _lengths.debugging():
        return
    wanted = begins.cpu().to(torch.int64)[: offsets.numel()] * of_row
    if not torch.equal(offsets.cpu().to(torch.int64), wanted):
        raise ValueError(
            f"{name}: requests must lie one after the other, {of_row} elements from row to row"
        )
