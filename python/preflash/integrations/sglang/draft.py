"""The decode steps of a draft model between two verify steps, each with a backend of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .backend import PreflashAttnBackend
from .layers import Source
from .limits import check_draft_window
from .steps import GraphMemory, Keys, Step, largest


class PreflashMultiStepDraftBackend:
    """SGLang's draft steps 0 to num_steps - 2, planned together from one block table.

    A request has topk branches, each of them a request of the step: step i has one query row and
    i + 1 keys of its own after the request's. With several branches the table is of pages of 1
    token, because a branch begins inside of the request's last page.

    Args:
        model_runner: of the draft model.
        topk: branches.
        speculative_num_steps: num_steps.
    """

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        check_draft_window(model_runner)
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [
            PreflashAttnBackend(model_runner, page_size=1 if topk > 1 else None)
            for _ in range(speculative_num_steps - 1)
        ]
        self._slots = self.attn_backends[0].slots
        self._allocation = model_runner.page_size
        self._more = torch.arange(1, speculative_num_steps, device=self._slots.device)
        self._memory: GraphMemory | None = None
        self._lengths: torch.Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans the eager steps."""
        self.init_forward_metadata_in_graph(forward_batch)
        steps = self._steps(forward_batch, in_graph=False)
        for backend, step in zip(self.attn_backends, steps, strict=True):
            backend.plans.plan(step)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what graphs of up to max_bs requests read."""
        rows = max_bs * self.topk
        self._memory = GraphMemory(self._slots, rows)
        for backend in self.attn_backends:
            backend.plans.forget_captures()
        self._lengths = torch.zeros(
            len(self.attn_backends), rows, dtype=torch.int32, device=self._slots.device
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans the steps that a CUDA graph captures or replays."""
        steps = self._steps(forward_batch, in_graph=True)
        for backend, step in zip(self.attn_backends, steps, strict=True):
            backend.check_scales(in_capture)
            plans = backend.plans
            plan = plans.plan_for_capture if in_capture else plans.plan_for_replay
            plan(step, forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def _steps(self, batch: Any, in_graph: bool) -> list[Step]:
        """Returns the step of each backend.

        Raises:
            ValueError: SGLang has no lengths on the host.
        """
        if batch.seq_lens_cpu is None:
            raise ValueError("draft steps need seq_lens_cpu, which this batch does not have")
        n, rows = batch.batch_size, batch.batch_size * self.topk
        bounds = np.repeat(np.asarray(batch.seq_lens_cpu, dtype=np.int32)[:n], self.topk)
        lengths = batch.seq_lens[:n]
        numbers = self._numbers(lengths, in_graph)
        tables: dict[Source, torch.Tensor] = {}

        def keys_of(source: Source, index: int) -> Keys:
            if source not in tables:
                tables[source] = self._slots.to_pages(
                    self._branch_slots(batch, lengths, largest(bounds)),
                    source is Source.WINDOW_POOL,
                    self._memory.table(source, rows) if in_graph else None,
                )
            step_bounds = np.minimum(bounds + np.int32(index + 1), self._slots.max_tokens)
            return Keys(step_bounds, True, numbers[index], tables[source])

        ones = np.ones(rows, np.int32)
        return [
            Step(ones, lambda source, index=index: keys_of(source, index))
            for index in range(len(self.attn_backends))
        ]

    def _numbers(self, lengths: torch.Tensor, in_graph: bool) -> torch.Tensor:
        """Returns the keys of every branch in every step, int32 [num_steps - 1, branches]."""
        n, steps = len(lengths), len(self.attn_backends)
        if in_graph:
            out = self._lengths[:, : n * self.topk]
        else:
            out = torch.empty(steps, n * self.topk, dtype=torch.int32, device=lengths.device)
        more, lengths = self._more[:, None, None], lengths[None, :, None]
        torch.add(lengths.expand(-1, -1, self.topk), more, out=out.unflatten(1, (n, self.topk)))
        return out

    def _branch_slots(self, batch: Any, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        rows = batch.req_pool_indices[: len(lengths)]
        num_tokens = min(longest + len(self.attn_backends), self._slots.max_tokens)
        if self.topk == 1:
            return self._slots.of_requests(rows, num_tokens)
        return self._slots.of_branches(
            rows,
            lengths,
            num_tokens,
            topk=self.topk,
            num_steps=self.speculative_num_steps,
            allocation=self._allocation,
        )
