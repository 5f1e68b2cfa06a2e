"""Decodes and prefills in one launch, preflash.attention.BatchAttention."""

from __future__ import annotations

import torch

from .._check import validate
from .._check.arguments import KvCache, Scale
from .._check.names import renamed, tells_nearest
from .._plan.pages import picked
from .paged import OverPages, Pages

_FLOAT_BYTES = 128 * 1024 * 1024


class BatchAttention(OverPages):
    """Attention of a batch of requests, each with any number of queries, over a paged KV cache in
    one launch: every kernel of this package takes such batches, and this is another way to ask.

    Args:
        kv_layout: "NHD" or "HND", the order inside a page.
        device: of all tensors, where the workspace of 128 MB is allocated.
        backend: "auto", "fa2", "fa3" or "cpu".

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    @tells_nearest
    def __init__(
        self,
        kv_layout: str = "NHD",
        device: str | torch.device = "cuda",
        *,
        backend: str = "auto",
    ) -> None:
        validate.one_of("kv_layout", kv_layout, validate.KV_LAYOUTS)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device={str(device)!r}: torch finds no CUDA device here; pass device='cpu' to "
                "compute on the CPU"
            )
        buffer = torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=device)
        self._pages = Pages(buffer, kv_layout, backend=backend)
        self._logits_soft_cap = 0.0

    @property
    def float_workspace_buffer(self) -> torch.Tensor:
        """Workspace in which split-KV partial results are merged."""
        return self._pages._float_workspace_buffer

    prewarm_paged_kv_stride_variant = Pages.prewarm_paged_kv_stride_variant

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
        *,
        seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """Chooses a kernel and makes its work list for a batch of these lengths.

        Args:
            qo_indptr: [batch_size + 1] int32, first token of each request in q.
            kv_indptr: [batch_size + 1] int32, first entry of each request in kv_indices.
            kv_indices: at least [kv_indptr[-1]] int32, pages; or a block table [batch_size,
                max_pages], of whose rows kv_indptr counts the entries.
            kv_len_arr: [batch_size] integers, keys of each request; read on the host, like the
                indptr arrays. A request may have more pages than its keys need.
            use_profiler: False only.
            seq_lens, lengths_are_upper_bounds: with True, kv_len_arr has upper bounds, and run()
                reads the lengths of keys from seq_lens.
            The others, and the errors, are those of BatchPrefillWithPagedKVCacheWrapper.plan().

        A CUDA graph replays the plan that it captured.
        """
        validate.neutral("use_profiler", use_profiler, False)
        page = validate.size("page_size", page_size)
        is_table = isinstance(kv_indices, torch.Tensor) and kv_indices.dim() == 2
        if not is_table:
            validate.conforms("kv_indices", kv_indices, "pages", self.device)
        at = validate.conforms("kv_indptr", kv_indptr, "indptr", self.device).cpu()
        lengths = validate.conforms("kv_len_arr", kv_len_arr, "wide_lengths", self.device).cpu()
        if at.numel() != lengths.numel() + 1:
            raise ValueError(
                f"kv_indptr has {at.numel()} elements and kv_len_arr {lengths.numel()}; must have "
                "batch_size + 1 and batch_size"
            )
        given, lengths = at.to(torch.int64).diff(), lengths.to(torch.int64)
        begin, end, room = int(at[0]), int(at[-1]), kv_indices.numel()
        if begin < 0 or end > room or bool((given < 0).any()):
            raise ValueError(
                f"kv_indptr goes from {begin} to {end}; must not decrease, and be in [0, {room}], "
                "what kv_indices has"
            )
        needed = (lengths + (page - 1)) // page
        wrong = ((lengths < 0) | (needed > given)).nonzero()
        if wrong.numel():
            request = int(wrong[0])
            raise ValueError(
                f"kv_len_arr[{request}] = {int(lengths[request])}: must be in [0, "
                f"{int(given[request]) * page}], what the request's pages hold"
            )
        if is_table:
            at = torch.nn.functional.pad(needed.cumsum(0), (1, 0)).to(torch.int32)
        elif bool((needed < given).any()):
            at, kv_indices, _ = picked(kv_indices, at[:-1], lengths, page)
        last = torch.where(needed > 0, lengths - (needed - 1) * page, 1).to(torch.int32)
        cap = validate.soft_cap("logits_soft_cap", logits_soft_cap)
        with renamed({"paged_kv_indptr": "kv_indptr", "paged_kv_indices": "kv_indices"}):
            self._pages.plan(
                qo_indptr, at, kv_indices, last, num_qo_heads, num_kv_heads, head_dim_qk, page,
                causal=causal, sm_scale=sm_scale, logits_soft_cap=cap, q_data_type=q_data_type,
                kv_data_type=kv_data_type, head_dim_vo=head_dim_vo, non_blocking=True,
                seq_lens=seq_lens, lengths_are_upper_bounds=lengths_are_upper_bounds,
                batch_invariant=batch_invariant,
            )  # fmt: skip
        self._logits_soft_cap = cap

    def run(
        self,
        q: torch.Tensor,
        kv_cache: KvCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: None = None,
        kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one layer of the planned batch on the current stream.

        Args:
            q, kv_cache, out, lse, k_scale, v_scale: those of
                BatchPrefillWithPagedKVCacheWrapper.run().
            logits_soft_cap: plan()'s, or 0 for it.
            profiler_buffer, kv_cache_sf: None only.

        Returns:
            (out, lse), lse base 2 and [rows of q, num_qo_heads].

        Raises:
            TypeError, ValueError: not planned, or a tensor is not what was planned.
        """
        validate.one_cache((out,), dims=4)
        validate.absent(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        cap = validate.soft_cap("logits_soft_cap", logits_soft_cap)
        if cap not in (0.0, self._logits_soft_cap):
            raise ValueError(
                f"logits_soft_cap={cap} in run() and {self._logits_soft_cap} in plan(); must be "
                "the same, or 0 in run()"
            )
        return self._pages.run(
            q, kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True, out=out, lse=lse
        )
