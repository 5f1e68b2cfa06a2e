"""Batches of the benchmark and of the demo, and samples of their rows for the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..testing import Case, Expected, Garbage, Inputs, build, reference
from ..testing.inputs import indptr, page_table


def batches(case: Case, device: torch.device, seed: int = 0) -> Iterator[Inputs]:
    """`Inputs` of a case without end: normal random q, k and v, made on the device itself, because
    batches are large: case without a custom mask, sinks and factors of heads. All share a page
    table; page slots that no request owns hold NaN, which no result may ever show. Ragged k and v
    have as many rows as there are keys. Index arrays are on the CPU except the page indices."""
    if case.has_custom_mask:
        raise ValueError(f"{case.id}: has a custom mask")
    case = dataclasses.replace(case, garbage=Garbage.NAN)
    random = torch.Generator(device).manual_seed(seed)
    table = page_table(case, torch.Generator().manual_seed(seed)) if case.paged else None
    while True:
        inputs = build(case, device=device, index_device="cpu", generator=random, table=table)
        if case.paged:
            inputs.indices = inputs.indices.to(device)
        else:
            tokens, count = 0 if case.layout == "NHD" else 1, sum(case.kv_lens)
            inputs.k, inputs.v = (t.narrow(tokens, 0, count) for t in (inputs.k, inputs.v))
        yield inputs


class Sample:
    """Some rows of a batch, to compare with the oracle: the first and the last of a request, where
    masks go wrong, and random ones between."""

    def __init__(self, qo_lens: Sequence[int], per_request: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.rows = [_pick(qo_len, per_request, random) for qo_len in qo_lens]
        begins = indptr(qo_lens)[:-1].tolist()
        tokens = [rows + begin for rows, begin in zip(self.rows, begins, strict=True)]
        self._tokens = torch.cat(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, ...] at the sampled rows."""
        return x[self._tokens.to(x.device)]

    def expected(self, inputs: Inputs) -> Expected:
        """The oracle's answer for the sampled rows."""
        return reference(inputs, rows=self.rows)


def _pick(qo_len: int, count: int, random: torch.Generator) -> torch.Tensor:
    ends = torch.tensor([0, qo_len - 1][:qo_len], dtype=torch.long, device="cpu")
    between = torch.randint(0, max(qo_len, 1), (count,), generator=random, device="cpu")
    return torch.cat([ends, between[: max(qo_len - 2, 0)]])[:count].unique()
