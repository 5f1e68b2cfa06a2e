"""Query rows and keys of one forward pass of SGLang, as plans take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from .layers import Source
from .tables import SlotTable


class Keys(NamedTuple):
    """Keys of the requests of a step, for layers of one Source."""

    bounds_cpu: np.ndarray  # int32 [num_requests], upper bounds of lengths
    exact: bool  # bounds_cpu are the lengths
    lengths: torch.Tensor  # int32 [num_requests], on the device
    table: torch.Tensor  # int32 [num_requests, max_pages], on the device


class Step:
    """One forward pass.

    Args:
        qo_lens_cpu: int [num_requests], query rows of each request.
        keys_of: makes the keys of a Source, at their first use.
        mask: bool, each request's [qo_len, kv_len] flattened and concatenated; None: causal.
        mask_memory: uint8, where a CUDA graph reads the packed mask.
    """

    def __init__(
        self,
        qo_lens_cpu: np.ndarray,
        keys_of: Callable[[Source], Keys],
        mask: torch.Tensor | None = None,
        mask_memory: torch.Tensor | None = None,
    ) -> None:
        self.qo_indptr_cpu = torch.zeros(len(qo_lens_cpu) + 1, dtype=torch.int32, device="cpu")
        np.cumsum(qo_lens_cpu, dtype=np.int32, out=self.qo_indptr_cpu.numpy()[1:])
        self.mask, self.mask_memory = mask, mask_memory
        self._keys_of, self._keys = keys_of, {}

    def keys(self, source: Source) -> Keys:
        found = self._keys.get(source)
        if found is None:
            found = self._keys[source] = self._keys_of(source)
        return found


class GraphMemory:
    """Memory that CUDA graphs read, for the largest batch of any graph.

    Args:
        max_requests: of any graph.
        mask_rows: query rows of a request with a custom mask; 0: no step has a mask.
    """

    def __init__(self, slots: SlotTable, max_requests: int, mask_rows: int = 0) -> None:
        self._slots, self._max_requests = slots, max_requests
        self._tables: dict[Source, torch.Tensor] = {}
        self._lengths: dict[Source, torch.Tensor] = {}
        self.mask: torch.Tensor | None = None  # packed
        if mask_rows:
            request_bytes = -(-mask_rows * slots.max_tokens // 8)
            num_bytes = max_requests * request_bytes + 8  # kernels read whole words
            self.mask = torch.zeros(num_bytes, dtype=torch.uint8, device=slots.device)

    def table(self, source: Source, num_requests: int) -> torch.Tensor:
        """Returns the first rows of a block table, int32 [num_requests, max_pages]."""
        if source not in self._tables:
            self._tables[source] = self._slots.empty_table(self._max_requests)
        return self._tables[source][:num_requests]

    def lengths(self, source: Source, num_requests: int) -> torch.Tensor:
        """Returns int32 [num_requests]."""
        if source not in self._lengths:
            self._lengths[source] = torch.zeros(
                self._max_requests, dtype=torch.int32, device=self._slots.device
            )
        return self._lengths[source][:num_requests]


class StepMaker:
    """Makes the Step of a ForwardBatch.

    Args:
        slots: SGLang's table of cache slots.
        is_encoder_decoder: a request's slots begin with those of its encoder tokens.
    """

    def __init__(self, slots: SlotTable, is_encoder_decoder: bool) -> None:
        self._slots, self._is_encoder_decoder = slots, is_encoder_decoder

    def __call__(
        self, batch: Any, is_tree: bool = False, memory: GraphMemory | None = None
    ) -> Step:
        """Returns the step of a ForwardBatch, or of SGLang's view of one. Does not wait for the
        device.

        Args:
            is_tree: the step verifies draft trees with the custom mask of its spec_info.
            memory: of the CUDA graph that the step is captured in or replays.

        Raises:
            NotImplementedError: a kind of step that preflash does not serve.
        """
        n = batch.batch_size
        if getattr(batch, "cross_attention_custom_mask", None) is not None:
            raise NotImplementedError("preflash takes no mask over encoder tokens")
        qo_lens, drafts = _query_lens(batch), 0
        if batch.forward_mode.is_target_verify():
            drafts = batch.spec_info.draft_token_num  # seq_lens does not count them

        def keys_of(source: Source) -> Keys:
            rows = batch.req_pool_indices[:n]
            if source is Source.ENCODER:
                bounds, exact = self._bounds(getattr(batch, "encoder_lens_cpu", None), n)
                lengths, num_tokens = batch.encoder_lens[:n], largest(bounds)
                slots = self._slots.of_requests(rows, num_tokens)
            else:
                bounds, exact = self._bounds(batch.seq_lens_cpu, n, drafts)
                lengths, num_tokens = batch.seq_lens[:n], largest(bounds)
                if self._is_encoder_decoder:
                    slots = self._slots.of_suffixes(rows, batch.encoder_lens[:n], num_tokens)
                else:
                    slots = self._slots.of_requests(rows, num_tokens)
            if memory is not None:
                numbers, table = memory.lengths(source, n), memory.table(source, n)
            else:
                numbers, table = torch.empty_like(lengths, dtype=torch.int32), None
            torch.add(lengths, drafts, out=numbers)
            table = self._slots.to_pages(slots, source is Source.WINDOW_POOL, table)
            return Keys(bounds, exact, numbers, table)

        mask = _padded_mask(batch, n, drafts) if is_tree else None
        return Step(qo_lens, keys_of, mask, None if memory is None else memory.mask)

    def _bounds(self, lengths_cpu: Any, n: int, more: int = 0) -> tuple[np.ndarray, bool]:
        """Returns upper bounds int32 [n] of lengths + more, and True if they are exact."""
        if lengths_cpu is None or len(lengths_cpu) < n:
            return np.full(n, self._slots.max_tokens, np.int32), False
        bounds = np.asarray(lengths_cpu, dtype=np.int32)[:n] + np.int32(more)
        return np.minimum(bounds, self._slots.max_tokens), True


def largest(bounds: np.ndarray) -> int:
    return max(int(bounds.max(initial=0)), 1)


def _query_lens(batch: Any) -> np.ndarray:
    """Returns the query rows of each request, int32 [batch_size]."""
    mode, n = batch.forward_mode, batch.batch_size
    if mode.is_decode_or_idle():
        return np.ones(n, np.int32)
    if mode.is_target_verify():
        if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
            raise NotImplementedError(
                "preflash verifies as many drafts for every request; unset "
                "SGLANG_RAGGED_VERIFY_MODE"
            )
        return np.full(n, batch.spec_info.draft_token_num, np.int32)
    if mode.is_dllm_extend():
        raise NotImplementedError("preflash serves no diffusion language models in SGLang")
    lens = getattr(batch, "extend_seq_lens_cpu", None)
    if lens is None and mode.is_draft_extend_v2():
        return np.full(n, batch.spec_info.num_tokens_per_req, np.int32)
    return np.asarray(lens, dtype=np.int32)[:n]


def _padded_mask(batch: Any, n: int, drafts: int) -> torch.Tensor:
    """Returns the custom mask of a verified step, with ones for the requests of padding.

    Raises:
        ValueError: SGLang has no lengths on the host, which place the requests' masks.
    """
    if batch.seq_lens_cpu is None:
        raise ValueError("a custom mask needs seq_lens_cpu, which this step does not have")
    mask = batch.spec_info.custom_mask
    missing = drafts * (int(batch.seq_lens_cpu[:n].sum()) + drafts * n) - mask.numel()
    if missing <= 0:
        return mask
    return torch.cat([mask, mask.new_ones(missing)])
