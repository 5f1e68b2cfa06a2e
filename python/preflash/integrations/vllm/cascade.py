"""Cascade attention of vLLM: all queries attend to the prefix of all requests in one launch.

vLLM 0.24 asks the builder in each step whose requests share blocks (use_cascade_attention()).
Later releases have no cascade attention and never ask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...cascade import run_levels
from .._paging import StepWrapper
from .layers import CacheForm


class CascadeCosts(NamedTuple):
    """Cost model of a cascade, for the attention of one layer.

    Without a cascade, each tile of a request's query rows reads the keys of the prefix. In a
    cascade, the rows of all requests share tiles, and the output of the prefix is written and
    merged.
    """

    tile_rows: int = 128  # packed rows of a tall tile, query heads of one kv head
    # Bytes of a tall tile's key or value, at least: its products take as long as a read of 16 bits.
    tall_bytes: int = 2
    # Measured on an H200 (docs/engines.md): partly from L2, where the prefix may be.
    bytes_per_us_per_sm: float = 60e3
    # A second launch with its split-KV merge, and merge_state_in_place(): 20 on the device, the
    # rest on the host, which limits eager decode steps.
    launches_us: float = 120.0
    # Launches by the host instead of a full CUDA graph, which vLLM does not replay with a cascade.
    piecewise_us: float = 50.0  # with piecewise graphs for the rest of the layer
    eager_us: float = 200.0  # without

    def saved_us(
        self,
        prefix_len: int,
        query_lens: np.ndarray,
        num_qo_heads: int,
        cache: CacheForm,
        num_sms: int,
    ) -> float:
        """Returns the time that a cascade saves in reading, before the costs in microseconds.

        Args:
            prefix_len: keys that all requests share.
            query_lens: [num_reqs], tokens of each request in the step.
        """
        rows = np.asarray(query_lens, dtype=np.int64) * (num_qo_heads // cache.num_kv_heads)
        plain = int((-(-rows // self.tile_rows)).sum())
        cascade = -(-int(rows.sum()) // self.tile_rows)
        size = cache.kv_dtype.itemsize
        reads = 2 * prefix_len * (plain * size - cascade * max(size, self.tall_bytes))
        moved = 4 * int(rows.sum()) * cache.o_dtype.itemsize  # O: two writes, two reads
        saved = cache.num_kv_heads * cache.head_dim * (reads - moved)
        return saved / (num_sms * self.bytes_per_us_per_sm)


COSTS = CascadeCosts()


class CascadeLevels(NamedTuple):
    """Index arrays of a step in two levels. Arrays of the host end in _cpu."""

    prefix: tuple  # arguments of StepWrapper.plan_step()
    suffix: tuple
    num_rows: int  # query rows of all requests


class CascadeArrays:
    """Builds the levels of a step. Lengths are kept at one address, so that steps share plans."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._prefix_lens = torch.empty(1, dtype=torch.int32, device=device)
        self._suffix_lens = torch.empty(0, dtype=torch.int32, device=device)

    def levels(self, step: Any, prefix_pages: int) -> CascadeLevels:
        """Splits a step after the first prefix_pages pages of every request.

        step: plans.Step, whose requests share these pages, except those without query rows.
        """
        prefix_len, num_reqs = prefix_pages * self._page_size, len(step.kv_bounds_cpu)
        num_rows = int(step.qo_indptr_cpu[-1])
        # In every step, because vLLM's sleep discards the contents of what builders have allocated.
        self._prefix_lens.fill_(prefix_len)
        if len(self._suffix_lens) < num_reqs:
            self._suffix_lens = self._suffix_lens.new_empty(num_reqs)
        suffix_lens = self._suffix_lens[:num_reqs]
        # Requests of padding have no keys.
        torch.sub(step.seq_lens, prefix_len, out=suffix_lens).clamp_(min=0)
        return CascadeLevels(
            (
                torch.tensor([0, num_rows], dtype=torch.int32, device="cpu"),
                np.array([prefix_len], np.int32),
                step.block_table[:1],
                self._prefix_lens,
            ),
            (
                step.qo_indptr_cpu,
                np.maximum(step.kv_bounds_cpu - prefix_len, 0),
                step.block_table[:, prefix_pages:],
                suffix_lens,
            ),
            num_rows,
        )


class CascadeStepWrapper:
    """Two StepWrappers: all queries on the shared prefix, and each request's on its own keys.

    options: of plan(), by name; causal is that of the requests' own keys.
    """

    is_cuda_graph_enabled = False

    def __init__(self, workspace: torch.Tensor, options: dict[str, Any]) -> None:
        self._levels = [
            StepWrapper(workspace, {**options, "causal": False}),
            StepWrapper(workspace, options),
        ]
        self._num_rows = 0

    @property
    def variant(self) -> str:
        """The id of each level's kernel, the prefix's first."""
        return ", ".join(str(level.variant) for level in self._levels)

    def plan_step(self, levels: CascadeLevels) -> None:
        """Plans both levels. Does not wait for the device."""
        for wrapper, arguments in zip(self._levels, (levels.prefix, levels.suffix), strict=True):
            wrapper.plan_step(*arguments)
        self._num_rows = levels.num_rows

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Runs both levels into out, whose rows of padding are not written; options: as in
        cascade.run_levels()."""
        rows = self._num_rows
        return run_levels(self._levels, q[:rows], paged_kv_cache, out=out[:rows], **options)
