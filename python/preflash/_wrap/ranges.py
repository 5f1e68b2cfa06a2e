"""Causal attention with spans that see themselves both ways,
preflash.attention.BatchPrefillWithCausalBidirectionalRangesWrapper."""

# NOTE: the API fixes long signatures; see paged.py.

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._check import values as check
from .._check.arguments import KvCache, Result, Scale, converted
from .._check.calls import PagedPlanArguments
from .._check.names import tells_nearest
from .._plan.items import written_out
from .paged import BatchPrefillWithPagedKVCacheWrapper

_WINDOWS_KEPT = 4


class _Masked(NamedTuple):
    """A wrapper planned with the mask of some ranges."""

    wrapper: BatchPrefillWithPagedKVCacheWrapper
    ranges: torch.Tensor  # a copy


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper whose run() takes a span of keys for every query:

        keep = (causal and within causal_window_left) or (in the span and within range_window_left)

    NOTE: the first run() after plan() with other ranges or other windows writes the mask out, plans
    again, and waits for the GPU: sum(qo_len * kv_len) bytes meanwhile and an eighth of that from
    then on, for each pair of windows. Later runs with the same ranges compare them, which on a GPU
    takes a wait too.

    Args:
        float_workspace_buffer, kv_layout: as in BatchPrefillWithPagedKVCacheWrapper.
        use_cuda_graph: False only, and run() cannot be captured: it reads the ranges.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf:
            without effect.
        pos_encoding_mode: "NONE" only.
        q_data_type, kv_data_type, o_data_type, head_dim_qk, head_dim_vo: what plan() uses where it
            is given none. It refuses to contradict them.
        backend: "auto", "fa2", "fa3" or "cpu".

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: use_cuda_graph, or a position encoding.
    """

    _serves_cudnn = False

    @tells_nearest
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        o_data_type: str | torch.dtype | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        *,
        backend: str = "auto",
    ) -> None:
        check.neutral("use_cuda_graph", use_cuda_graph, False)
        check.neutral("pos_encoding_mode", pos_encoding_mode, "NONE")
        q_dtype = check.query_dtype("q_data_type", q_data_type)
        self._constructed_with = {
            "q_data_type": q_dtype,
            "kv_data_type": check.kv_dtype("kv_data_type", kv_data_type, q_dtype),
            "o_data_type": check.output_dtype("o_data_type", o_data_type, q_dtype),
            "head_dim_qk": check.positive("head_dim_qk", head_dim_qk),
            "head_dim_vo": check.positive("head_dim_vo", head_dim_vo),
        }
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            False,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            backend=backend,
        )
        self._given: PagedPlanArguments | None = None
        self._masked: dict[tuple[int, int], _Masked] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: None = None,
        packed_custom_mask: None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: None = None,
        token_pos_in_items_ptr: None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Takes the lengths of a batch, as BatchPrefillWithPagedKVCacheWrapper.plan().

        Args:
            custom_mask, packed_custom_mask, causal, window_left, prefix_len_ptr,
            token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, pos_encoding_mode,
            logits_soft_cap:
                their defaults only (of the cap also 0): run() has the mask and its windows.
            The others are those of BatchPrefillWithPagedKVCacheWrapper.plan().

        Raises:
            TypeError, ValueError: an argument is wrong, or contradicts the constructor.
            NotImplementedError: no compiled kernel serves it.
            The wrapper keeps the plan it had.
        """
        super()._plan(self._arguments(locals()))
        self._given = self._arguments(locals(), own=True)
        self._masked = {}

    begin_forward = plan

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """As in BatchPrefillWithPagedKVCacheWrapper; the work lists of masks stay in memory of
        their own."""
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._masked = {}

    def workspace_size(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: None = None,
        packed_custom_mask: None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        prefix_len_ptr: None = None,
        token_pos_in_items_ptr: None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> tuple[int, int]:
        """(float_bytes, int_bytes) that plan() with these arguments uses at most. Plans nothing."""
        return super()._workspace_size(self._arguments(locals()))

    def _arguments(self, given: dict[str, Any], *, own: bool = False) -> PagedPlanArguments:
        """Those of a paged plan without a mask. own: with copies of arrays that the caller may
        change."""
        check.absent(
            **{
                name: given[name]
                for name in ("custom_mask", "packed_custom_mask", "prefix_len_ptr",
                             "token_pos_in_items_ptr", "max_item_len_ptr")
            }
        )  # fmt: skip
        for name, neutral in (
            ("causal", False),
            ("pos_encoding_mode", "NONE"),
            ("window_left", -1),
            ("token_pos_in_items_len", 0),
        ):
            check.neutral(name, given[name], neutral)
        check.neutral("logits_soft_cap", given["logits_soft_cap"], 0.0)
        options = dict(self._constructed_with)
        for name, announced in self._constructed_with.items():
            value = given[name]
            if value is None:
                continue
            value = check.dtype(name, value) if name.endswith("type") else value
            if value != announced:
                raise ValueError(
                    f"{name}={value} in plan() contradicts the constructor's {announced}: give "
                    "both the same, or construct another wrapper"
                )
        head_dim = options.pop("head_dim_qk")
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            array = given[name]
            # Pages on a GPU stay there, as in every plan.
            stays = not own or (name == "paged_kv_indices" and not array.is_cpu)
            options[name] = array if stays else array.to("cpu", copy=True)
        for name in (
            "num_qo_heads", "num_kv_heads", "page_size", "sm_scale", "use_fp16_qk_reduction",
            "max_token_per_sequence", "max_sequence_kv", "fixed_split_size", "disable_split_kv",
        ):  # fmt: skip
            options[name] = given[name]
        return PagedPlanArguments(head_dim=head_dim, causal=True, **options)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> Result:
        """Computes one layer of the planned batch on the current stream.

        Args:
            bidirectional_ranges: [rows of q, 2] int32, contiguous, on q's device: the first and the
                last key of each query's span, counted from its request's first key; (-1, -1) where
                there is none.
            causal_window_left: how many keys left of the diagonal the causal part keeps; negative
                is all.
            range_window_left: how many keys the span keeps up to the diagonal, that of the diagonal
                included; what lies behind the diagonal is kept. 0 and below: all.
            The others are those of BatchPrefillWithPagedKVCacheWrapper.run().

        Returns:
            out [rows of q, num_qo_heads, head_dim_vo], or (out, lse) with return_lse.

        Raises:
            TypeError, ValueError: not planned, or a tensor is not what was planned. Nothing is
            launched. RuntimeError: the stream is being captured.
        """
        ranges = check.tensor("bidirectional_ranges", bidirectional_ranges)
        check.has_dtype("bidirectional_ranges", ranges, torch.int32, "positions of keys")
        check.has_shape(
            "bidirectional_ranges", ranges, (check.is_tensor("q", q).shape[0], 2), "[rows of q, 2]"
        )
        check.on_device("bidirectional_ranges", ranges, q.device)
        if not ranges.is_contiguous():
            raise ValueError(
                f"bidirectional_ranges has strides {tuple(ranges.stride())}; must be contiguous"
            )
        windows = (
            max(check.integer("causal_window_left", causal_window_left, at_least=-(2**31)), -1),
            max(check.integer("range_window_left", range_window_left, at_least=-(2**31)), 0),
        )
        return self._with_mask(ranges, windows).run(
            q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
            q_scale=q_scale, out=out, lse=lse, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run(*args, return_lse=True, **options)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> torch.Tensor:
        """run(), whose options it has."""
        return self.run(
            q, paged_kv_cache, bidirectional_ranges, causal_window_left, range_window_left,
            q_scale, k_scale, v_scale, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run_return_lse(
            q, paged_kv_cache, bidirectional_ranges, causal_window_left, range_window_left,
            q_scale, k_scale, v_scale, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    @check.eager
    def _with_mask(
        self, ranges: torch.Tensor, windows: tuple[int, int]
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        """One that is planned for what these ranges and windows keep."""
        batch = self._planned().asked.request.lengths.batch
        if self._state.workspace.device_stream.is_capturing():
            raise RuntimeError(
                "run() reads bidirectional_ranges, which it cannot while its stream is being "
                "captured into a CUDA graph; BatchPrefillWithPagedKVCacheWrapper takes the mask as "
                "custom_mask"
            )
        found = self._masked.get(windows)
        if found is not None and torch.equal(found.ranges, ranges):
            return found.wrapper
        if ranges.shape[0] < batch.qo_end:
            raise ValueError(
                f"q has {ranges.shape[0]} rows; qo_indptr[-1] = {batch.qo_end} are in use"
            )
        causal_window, range_window = windows
        begins = batch.qo_indptr

        def keeps(request: int, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            span = ranges[begins[request] : begins[request + 1]]
            behind = positions - keys
            causal, in_span = behind >= 0, (keys >= span[:, :1]) & (keys <= span[:, 1:])
            if causal_window >= 0:
                causal &= behind <= causal_window
            if range_window > 0:
                in_span &= behind < range_window
            return causal | in_span

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self._float_workspace_buffer, self._kv_layout, backend=self._requested_backend.name
        )
        mask = written_out(batch, self.device, keeps)
        wrapper._plan(converted(self._given, PagedPlanArguments, causal=False, custom_mask=mask))
        others = [(key, one) for key, one in self._masked.items() if key != windows]
        kept = dict(others[-_WINDOWS_KEPT + 1 :])
        self._masked = {**kept, windows: _Masked(wrapper, ranges.clone())}
        return wrapper
