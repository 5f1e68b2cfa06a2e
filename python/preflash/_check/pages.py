"""Checks of preflash.page's arguments, as far as they need no wait for the GPU."""

from __future__ import annotations

import torch

from .. import _core
from . import validate

_INT32_MAX = 2**31 - 1


def may_be_read(array: torch.Tensor) -> bool:
    """True if the values are readable without a device sync, or under PREFLASH_DEBUG."""
    return array.is_cpu or _core.debugging()


def _first(wrong: torch.Tensor) -> int | None:
    return int(wrong.to(torch.uint8).argmax()) if bool(wrong.any()) else None


def _rising(name: str, indptr: torch.Tensor) -> torch.Tensor:
    """Returns the steps of an indptr. Raises ValueError if one is negative."""
    steps = indptr.diff()
    if int(indptr[0]) < 0 or bool((steps < 0).any()):
        raise ValueError(
            f"{name} goes from {int(indptr[0])} to {int(indptr[-1])} with a smallest step of "
            f"{int(steps.min()) if steps.numel() else 0}; must rise from 0 or more"
        )
    return steps


def appended(append_indptr: torch.Tensor, seq_lens: torch.Tensor) -> None:
    appended = _rising("append_indptr", append_indptr)
    request = _first((seq_lens < appended) | (seq_lens > _INT32_MAX))
    if request is not None:
        raise ValueError(
            f"seq_lens[{request}] = {int(seq_lens[request])}: must be at least the "
            f"{int(appended[request])} tokens that are appended to the request, because it is the "
            "length after that, and at most 2^31 - 1"
        )


def page_table(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
    pages = _rising("kv_indptr", indptr)
    request = _first((pages > 0) & ((last_page_len < 1) | (last_page_len > page_size)))
    if request is not None:
        raise ValueError(
            f"kv_last_page_len[{request}] = {int(last_page_len[request])}: must be in "
            f"[1, page_size] = [1, {page_size}]"
        )
    longest = int(pages.max()) if pages.numel() else 0
    if longest * page_size > _INT32_MAX:
        raise ValueError(
            f"kv_indptr: a request has {longest} pages of {page_size} tokens; must be less than "
            "2^31 tokens"
        )


def in_use(indices: torch.Tensor, indptr: torch.Tensor) -> None:
    if indices.dim() == 2:
        longest = int(indptr.diff().max()) if indptr.numel() > 1 else 0
        if longest > indices.shape[1]:
            raise ValueError(
                f"kv_indices has {indices.shape[1]} columns; kv_indptr counts {longest} pages of a "
                "request"
            )
        return
    if int(indptr[-1]) > indices.numel():
        raise ValueError(
            f"kv_indices has {indices.numel()} elements; kv_indptr[-1] = {int(indptr[-1])} pages "
            "are in use"
        )


def rows(name: str, given: torch.Tensor, pool: torch.Tensor) -> int:
    """Checks the appended rows of k or v against the cache; returns the number of tokens."""
    validate.tensor(name, given)
    for what, value in ((name, given), ("the cache", pool)):
        if value.is_conj() or value.is_quantized:
            raise TypeError(
                f"{what} is {'a conjugate view' if value.is_conj() else value.dtype}, whose memory "
                "holds other numbers than it has, and memory is what is copied; pass "
                "resolve_conj() or int_repr()"
            )
    if pool.dim() > 0:
        validate.contiguous_rows("the cache", pool)
    known = {"num_kv_heads": pool.shape[2], "head_dim": pool.shape[3], "cache_dtype": pool.dtype}
    return validate.conforms(name, given, "append_rows", pool.device, known).shape[0]


def index_arrays(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, device: torch.device | None = None
) -> None:
    """Checks the pages of each request: their indptr, and the tokens in the last one."""
    indptr = validate.conforms("kv_indptr", kv_indptr, "append_indptr", device)
    known = {"batch_size": indptr.numel() - 1}
    validate.conforms("kv_last_page_len", kv_last_page_len, "append_lengths", indptr.device, known)


def places(batch_indices: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> None:
    """Checks that every token of a request lies within the request's length."""
    owned = batch_indices >= 0
    request, position = batch_indices[owned].long(), positions[owned]
    if request.numel() == 0:
        return
    if int(request.max()) >= lengths.numel():
        raise ValueError(
            f"batch_indices holds {int(request.max())}; the page table has {lengths.numel()} "
            "requests"
        )
    at = _first((position < 0) | (position >= lengths[request]))
    if at is not None:
        raise ValueError(
            f"positions: {int(position[at])} for request {int(request[at])}, whose pages hold "
            f"{int(lengths[request[at]])} tokens; the page table must have room for what is "
            "appended"
        )


def pages(used: torch.Tensor, count: int) -> None:
    if used.numel() > 0 and (int(used.min()) < 0 or int(used.max()) >= count):
        raise ValueError(
            f"kv_indices holds pages from {int(used.min())} to {int(used.max())}; must be in "
            f"[0, {count}), the pages of the cache"
        )
