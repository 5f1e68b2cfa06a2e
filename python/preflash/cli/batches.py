"""Inputs of one case made again and again on one page table: a set per layer, or several to rotate
over.

Made on the device itself, because benchmark batches are large; `preflash.testing.build` makes the
small and awkward ones. Page slots that no request owns hold NaN, which no result may ever show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from ..testing import Case, Expected, Inputs, KvForm, reference
from ..testing.inputs import indptr

_SPARE_PAGES = 2


class BatchMaker:
    """Makes `Inputs` of a case with NHD layout, ragged or with a 5-D cache, and no custom mask.
    Index arrays are on the CPU except the page indices, which are on the device."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        form = KvForm.COMBINED if case.paged else KvForm.SEPARATE
        if case.layout != "NHD" or case.form is not form or case.has_custom_mask:
            raise ValueError(f"{case.id}: not a plain NHD case without a custom mask")
        self._case = case
        self._device = device
        self._random = torch.Generator(device).manual_seed(seed)
        self._page_table = _page_table(case, seed) if case.paged else None

    def make(self) -> Inputs:
        """A new set: normal random q, k and v."""
        case = self._case
        q = self._normal(sum(case.qo_lens), case.num_qo_heads, case.head_dim)
        num_keys = sum(case.kv_lens)
        k = self._normal(num_keys, case.num_kv_heads, case.head_dim)
        v = self._normal(num_keys, case.num_kv_heads, case.dim_vo)
        inputs = Inputs(
            case=case,
            q=q,
            qo_indptr=indptr(case.qo_lens),
            kv_indptr=indptr(case.kv_lens),
            k=k,
            v=v,
        )
        if self._page_table is not None:
            self._into_pages(inputs, self._page_table)
        return inputs

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(
            shape, dtype=self._case.dtype, device=self._device, generator=self._random
        )

    def _into_pages(self, inputs: Inputs, table: list[list[int]]) -> None:
        case = self._case
        flat = [page for pages in table for page in pages]
        shape = (len(flat) + _SPARE_PAGES, 2, case.page_size, case.num_kv_heads, case.head_dim)
        cache = torch.full(shape, math.nan, dtype=case.dtype, device=self._device)
        slots = torch.cat(
            [_slots(pages, n, case.page_size) for pages, n in zip(table, case.kv_lens, strict=True)]
        ).to(self._device)
        page, offset = slots // case.page_size, slots % case.page_size
        cache[page, 0, offset] = inputs.k
        cache[page, 1, offset] = inputs.v
        inputs.k, inputs.v, inputs.cache = cache[:, 0], cache[:, 1], cache
        inputs.page_table = table
        inputs.kv_indptr = indptr([len(pages) for pages in table])
        inputs.indices = torch.tensor(flat, dtype=torch.int32, device=self._device)
        inputs.last_page_len = torch.tensor(
            [(n - 1) % case.page_size + 1 if n else 0 for n in case.kv_lens],
            dtype=torch.int32,
            device="cpu",
        )


def _page_table(case: Case, seed: int) -> list[list[int]]:
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    order = torch.randperm(
        sum(counts) + _SPARE_PAGES, generator=torch.Generator().manual_seed(seed), device="cpu"
    ).tolist()
    ends = indptr(counts).tolist()
    return [order[begin:end] for begin, end in itertools.pairwise(ends)]


def _slots(pages: list[int], kv_len: int, page_size: int) -> torch.Tensor:
    first = torch.tensor(pages, dtype=torch.long, device="cpu") * page_size
    every = first[:, None] + torch.arange(page_size, device="cpu")
    return every.flatten()[:kv_len]


class Sample:
    """Some rows of a batch, to compare with the oracle: the first and the last of a request, where
    masks go wrong, and random ones between."""

    def __init__(self, qo_lens: Sequence[int], per_request: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.rows = [_pick(qo_len, per_request, random) for qo_len in qo_lens]
        begins = indptr(qo_lens).tolist()
        self._tokens = torch.cat(
            [rows + begin for rows, begin in zip(self.rows, begins, strict=False)]
        )

    def __len__(self) -> int:
        return len(self._tokens)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, ...] at the sampled rows."""
        return x[self._tokens.to(x.device)]

    def expected(self, inputs: Inputs) -> Expected:
        """The oracle's answer for the sampled rows."""
        return reference(inputs, rows=self.rows)


def _pick(qo_len: int, count: int, random: torch.Generator) -> torch.Tensor:
    ends = torch.tensor([0, qo_len - 1][: min(qo_len, 2)], dtype=torch.long, device="cpu")
    between = torch.randint(0, max(qo_len, 1), (count,), generator=random, device="cpu")
    return torch.cat([ends, between[: max(qo_len - 2, 0)]])[:count].unique()
