"""Requests, and the arrays of a batch [(request, new tokens), ...] that preflash plans by."""

import dataclasses
import itertools

import torch

PAGE = 16  # tokens


@dataclasses.dataclass
class Request:
    tokens: list[int]  # the prompt, then what was generated
    goal: int  # length to stop at
    cached: int = 0  # tokens whose keys are in the cache
    pages: list[int] = dataclasses.field(default_factory=list)


def indptr(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def page_table(batch):
    """indptr, indices and last_page_len of requests with their new tokens."""
    last = torch.tensor([(r.cached + new - 1) % PAGE + 1 for r, new in batch])
    indices = torch.tensor([page for r, _ in batch for page in r.pages])
    return [indptr(len(r.pages) for r, _ in batch), indices.int(), last.int()]


def inputs(batch):
    """Ids of the new tokens, their positions, and whose each is."""
    spans = [(i, r, range(r.cached, r.cached + new)) for i, (r, new) in enumerate(batch)]
    rows = [(r.tokens[position], position, i) for i, r, span in spans for position in span]
    return torch.tensor(rows).t().contiguous()
