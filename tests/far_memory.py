"""Moves the pages of a batch far apart, for tests of large offsets."""

from collections.abc import Sequence

import torch
from preflash.testing import Inputs


def move_pages(inputs: Inputs, pools: Sequence[torch.Tensor], where: torch.Tensor) -> None:
    """Moves page i of K and V to page where[i] of other pools."""
    for pool, small in zip(pools, (inputs.k, inputs.v), strict=True):
        pool[where] = small
    inputs.indices = where[inputs.indices.long()].int()
    inputs.page_table = [[int(where[p]) for p in request] for request in inputs.page_table]
    inputs.k, inputs.v = inputs.cache = tuple(pools)
