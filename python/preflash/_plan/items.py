"""Masks that calls describe in fewer numbers, written out: [qo_len, kv_len] of every request."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import values as check

# What one request keeps, [qo_len, kv_len]: of its number, the positions of its queries among its
# keys, [qo_len, 1], and its keys, [1, kv_len].
Keeps = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class Items(NamedTuple):
    """Multi-item scoring as plan() was given it; prefix_len_ptr is None without."""

    prefix_len_ptr: torch.Tensor | None = None
    token_pos_in_items_ptr: torch.Tensor | None = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: torch.Tensor | None = None


NO_ITEMS = Items()


def items_of(a: Any) -> Items:
    return Items(*(getattr(a, name) for name in Items._fields))


def written_out(batch: _core.Batch, device: torch.device, keeps: Keeps) -> torch.Tensor:
    """The masks of all requests, flat bool, one request after the other."""
    sizes = [batch.qo_len(i) * batch.kv_len(i) for i in range(batch.num_requests)]
    mask = torch.empty(sum(sizes), dtype=torch.bool, device=device)
    begin = 0
    for request, size in enumerate(sizes):
        if size == 0:
            continue
        rows, columns = batch.qo_len(request), batch.kv_len(request)
        keys = torch.arange(columns, device=device)
        positions = torch.arange(columns - rows, columns, device=device)
        end = begin + size
        mask[begin:end].view(rows, columns).copy_(keeps(request, positions[:, None], keys[None]))
        begin = end
    return mask


_ALONE = Items._fields[1:]
_alone = operator.attrgetter(*_ALONE)


def check_alone(a: Any) -> None:
    """Without prefix_len_ptr nothing is given that goes with it."""
    if _core.same_objects(_alone(a), (None, 0, None)):
        return
    for name in _ALONE:
        value = getattr(a, name)
        if name == "token_pos_in_items_len" and value is not None:
            value = check.integer(name, value, at_least=0) or None
        if value is not None:
            raise ValueError(f"{name} is given without prefix_len_ptr, which it goes with")


def mask_of(a: Any, batch: _core.Batch, device: torch.device) -> torch.Tensor:
    """The mask of multi-item scoring, where plan() is given prefix_len_ptr."""
    for name in ("custom_mask", "packed_custom_mask"):
        if getattr(a, name) is not None:
            raise ValueError(f"{name} is given with prefix_len_ptr, which is another mask")
    each = check.integer("token_pos_in_items_len", a.token_pos_in_items_len, at_least=0)
    requests = batch.num_requests
    prefix = _integers("prefix_len_ptr", a.prefix_len_ptr, requests, device)
    if a.max_item_len_ptr is not None:
        _integers("max_item_len_ptr", a.max_item_len_ptr, requests, device)
    if a.token_pos_in_items_ptr is None:
        raise ValueError("token_pos_in_items_ptr=None: must be given with prefix_len_ptr")
    in_items = _integers("token_pos_in_items_ptr", a.token_pos_in_items_ptr, 0, device)
    # Tokens without a position are delimiters, as is the last entry.
    in_items = torch.nn.functional.pad(in_items, (0, 1))

    def keeps(request: int, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        first, begin = prefix[request], request * each
        entries = begin + positions - first
        end = min(begin + each, in_items.numel() - 1)
        last = in_items[torch.where((entries >= begin) & (entries < end), entries, -1)]
        in_prefix = (positions < first) | (keys < first)
        return (keys <= positions) & (in_prefix | (keys > positions - last))

    return written_out(batch, device, keeps)


def _integers(name: str, value: Any, count: int, device: torch.device) -> torch.Tensor:
    """At least `count` of them, flat, as int64 on the device."""
    value = check.integers(name, check.tensor(name, value), device)
    if value.numel() < count:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must have {count} elements")
    return value.reshape(-1).to(device).to(torch.int64)
