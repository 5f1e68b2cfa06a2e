"""`Inputs` in other memory, or less of them: what a result may not depend on."""

from __future__ import annotations

import dataclasses

import torch
from preflash.testing.case import MaskKind
from preflash.testing.inputs import Inputs, as_nhd, attach_masks, fill_poison, indptr, pages_of

from .guarded import bits


def surrounded(inputs: Inputs, padding: int) -> Inputs:
    """Puts the batch between rows of q, and pages or keys, that belong to no request."""
    if padding == 0:
        return inputs
    generator = torch.Generator().manual_seed(padding)
    tokens = 0 if inputs.case.layout == "NHD" else 1

    def garbage(like: torch.Tensor, dim: int) -> torch.Tensor:
        shape = (*like.shape[:dim], padding, *like.shape[dim + 1 :])
        blank = torch.empty(shape, dtype=like.dtype, device="cpu")
        return fill_poison(blank, generator, inputs.case.garbage).to(like.device)

    def joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.cat([bits(part) for part in parts], dim).view(parts[0].dtype)

    q = joined([garbage(inputs.q, 0), inputs.q, garbage(inputs.q, 0)], 0)
    around = dataclasses.replace(inputs, q=q, qo_indptr=inputs.qo_indptr + padding)
    around.kv_indptr = inputs.kv_indptr + padding
    if inputs.indices is None:
        pairs = ([garbage(t, tokens), t] for t in (inputs.k, inputs.v))
        around.k, around.v = (joined(pair, tokens) for pair in pairs)
    else:
        nobodys = inputs.indices.new_tensor([-1, 2**31 - 1] * padding)[:padding]
        around.indices = torch.cat([nobodys, inputs.indices])
    return around


def with_bounds(inputs: Inputs, num_pages: int = 2) -> Inputs:
    """Gives each request full pages of other requests as well: upper bounds of its keys."""
    pages, more = [inputs.indices[: int(inputs.kv_indptr[0])]], inputs.indices.new_zeros(num_pages)
    for own in inputs.page_table:
        pages += [inputs.indices.new_tensor(own), more]
    starts = inputs.kv_indptr
    return dataclasses.replace(
        inputs, indices=torch.cat(pages),
        kv_indptr=starts + num_pages * torch.arange(len(starts)).to(starts),
        last_page_len=torch.full_like(inputs.last_page_len, inputs.case.page_size),
    )  # fmt: skip


def lone(inputs: Inputs, i: int) -> Inputs:
    """Makes a batch of request i alone, in the memory that it shares with the others."""
    return part(inputs, i, 0, inputs.case.qo_lens[i])


def part(inputs: Inputs, i: int, begin: int, end: int) -> Inputs:
    """Makes a batch of rows [begin, end) of request i: a chunk of its prefill, or a decode step."""
    case, index_device = inputs.case, inputs.qo_indptr.device
    kv_len = case.kv_lens[i] - (case.qo_lens[i] - end if case.mask is MaskKind.CAUSAL else 0)
    cut = dataclasses.replace(
        inputs,
        case=dataclasses.replace(case, qo_lens=(end - begin,), kv_lens=(kv_len,)),
        q=inputs.q.narrow(0, sum(case.qo_lens[:i]) + begin, end - begin),
        qo_indptr=indptr([end - begin], index_device),
    )
    if case.paged:
        pages = inputs.page_table[i][: -(-kv_len // case.page_size)]
        cut.page_table = [pages]
        cut.kv_indptr = indptr([len(pages)], index_device)
        cut.indices = torch.tensor(pages, dtype=torch.int32, device=index_device)
        last = kv_len - (len(pages) - 1) * case.page_size if pages else -(2**31)
        cut.last_page_len = torch.full_like(inputs.last_page_len[:1], last)
    else:
        tokens = 0 if case.layout == "NHD" else 1
        first = sum(case.kv_lens[:i])
        cut.k, cut.v = (t.narrow(tokens, first, kv_len) for t in (inputs.k, inputs.v))
        cut.kv_indptr = indptr([kv_len], index_device)
    if inputs.masks is not None:
        cut.masks = [inputs.masks[i][begin:end]]
        attach_masks(cut, cut.masks, inputs.q.device)
    return cut


def spoil(inputs: Inputs, i: int) -> None:
    """Writes garbage over all of request i: its rows of q, and its keys and values."""
    case = inputs.case
    rows = inputs.q.narrow(0, sum(case.qo_lens[:i]), case.qo_lens[i])
    fill_poison(rows, torch.Generator().manual_seed(i))
    _spoil_keys(inputs, i, case.kv_lens[i])


def recycle(inputs: Inputs) -> None:
    """Writes garbage over the keys below the windows of all rows: an engine uses their pages."""
    case = inputs.case
    if case.mask is not MaskKind.CAUSAL or case.window_left < 0:
        return
    for i, (qo_len, kv_len) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
        _spoil_keys(inputs, i, max(kv_len - qo_len - case.window_left, 0))


def _spoil_keys(inputs: Inputs, i: int, count: int) -> None:
    """Writes garbage over the first keys and values of request i."""
    case, generator = inputs.case, torch.Generator().manual_seed(i)
    for t in (inputs.k, inputs.v):
        if case.paged:
            slots = torch.arange(count, device=t.device)
            page = torch.tensor(inputs.page_table[i], dtype=torch.long, device=t.device)
            place = (page[slots // case.page_size], slots % case.page_size)
            view = pages_of(t, case)
            view[place] = fill_poison(view[place], generator)
        else:
            rows = as_nhd(t, case.layout).narrow(0, sum(case.kv_lens[:i]), count)
            fill_poison(rows, generator)
