"""Padded, packed and densely masked sequences as requests over query rows and key slots."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Requests:
    """The requests of one batch, in the order of the query rows, all of which they cover.

    Request i has qo_lens[i] query rows and key slots spans[i] = (sequence, begin, end); its last
    query is at slot end - 1. A run of padding is a request without keys.
    """

    qo_lens: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    mask: torch.Tensor | None = None  # bool, of all requests one after the other; replaces bounds

    def __eq__(self, other: object) -> bool:
        """True if a plan of one serves the other."""
        if not isinstance(other, Requests) or self.mask is not other.mask:
            return False
        return (self.qo_lens, self.spans) == (other.qo_lens, other.spans)

    @functools.cached_property
    def kv_indptr(self) -> list[int] | None:
        """kv_indptr if all requests' keys follow each other in sequence 0; else None."""
        filled = [(begin, end) for _, begin, end in self.spans if end > begin]
        if any(sequence for sequence, _, _ in self.spans):
            return None
        if any(a[1] != b[0] for a, b in itertools.pairwise(filled)):
            return None
        indptr = [filled[0][0] if filled else 0]
        for _, begin, end in self.spans:
            indptr.append(indptr[-1] + end - begin)
        return indptr

    @functools.cached_property
    def slots(self) -> int:
        """Minimum cache slots per sequence."""
        return max((end for _, _, end in self.spans), default=0)

    @functools.cached_property
    def at_first_slot(self) -> bool:
        """True if the keys of every request begin at slot 0 of their sequence."""
        return all(begin == 0 for _, begin, end in self.spans if end)


@functools.lru_cache(maxsize=16)
def even(batch: int, qo_len: int, kv_len: int) -> Requests:
    """Sequences of one length, whose keys begin at slot 0."""
    return Requests((qo_len,) * batch, tuple((i, 0, kv_len) for i in range(batch)))


def of_lengths(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, rows: int) -> Requests:
    """Requests of packed sequences, and rows of padding after them."""
    qo_ends, kv_ends = torch.stack((qo_indptr, kv_indptr)).tolist()  # one wait for both
    qo_lens = [end - begin for begin, end in itertools.pairwise(qo_ends)]
    spans = [(0, begin, end) for begin, end in itertools.pairwise(kv_ends)]
    if rows > qo_ends[-1]:
        qo_lens.append(rows - qo_ends[-1])
        spans.append((0, 0, 0))
    return Requests(tuple(qo_lens), tuple(spans))


def of_ids(ids: torch.Tensor, qo_len: int, causal: bool) -> Requests | None:
    """Padded or packed sequences; None for a sequence with holes.

    ids: [batch, slots] on the CPU, bool or int. 0 is padding. Slots of one number are one sequence.
    With causal, or where there are several sequences in a row, the queries are the last slots.
    """
    if ids.dtype == torch.bool and ids.all():
        return even(len(ids), qo_len, ids.shape[1])
    ids = ids.int()
    starts = (torch.nn.functional.pad(ids, (1, 0), value=-1).diff() != 0).nonzero()
    numbers = ids[tuple(starts.t())].tolist()
    runs = [[] for _ in ids]  # (number, begin, end) of each row
    for (i, begin), number, (j, end) in zip(
        starts.tolist(), numbers, [*starts[1:].tolist(), (-1, 0)], strict=True
    ):
        runs[i].append((number, begin, end if i == j else ids.shape[1]))
    qo_lens, spans, first = [], [], ids.shape[1] - qo_len
    for i, row in enumerate(runs):
        filled = [number for number, _, _ in row if number]
        if len(set(filled)) < len(filled):
            return None
        if not causal and len(filled) <= 1:  # every query sees it
            qo_lens.append(qo_len)
            spans.append(next(((i, begin, end) for n, begin, end in row if n), (i, 0, 0)))
            continue
        for number, begin, end in row:
            if end > first:
                qo_lens.append(end - max(begin, first))
                spans.append((i, begin, end) if number else (i, 0, 0))
    return Requests(tuple(qo_lens), tuple(spans))


def of_dense(mask: torch.Tensor, batch: int) -> Requests:
    """Any mask: bool [batch or 1, 1, queries, keys], True where a query sees a key."""
    if mask.shape[1] != 1:
        raise NotImplementedError(
            f"attention_mask is {tuple(mask.shape)}: one mask for each head is not served; "
            "it must be [batch, 1, queries, keys]"
        )
    qo_len, kv_len = mask.shape[2:]
    mask = mask.expand(batch, -1, -1, -1).reshape(-1)
    spans = tuple((i, 0, kv_len) for i in range(batch))
    return Requests((qo_len,) * batch, spans, mask)
