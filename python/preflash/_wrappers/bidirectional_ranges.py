"""Causal attention with spans that see themselves both ways,
preflash.attention.BatchPrefillWithCausalBidirectionalRangesWrapper."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._check import torch_modes, validate
from .._check.arguments import KvCache, Result, Scale, converted
from .._check.calls import PagedPlanArguments
from .._check.names import tells_nearest
from .._plan.masks import written_out
from .options import check_constructor_options
from .paged import BatchPrefillWithPagedKVCacheWrapper

_WINDOWS_KEPT = 4

# Options of plan() that must keep these values: run() sets the mask and its windows.
_NEUTRAL = {
    "causal": False,
    "pos_encoding_mode": "NONE",
    "window_left": -1,
    "token_pos_in_items_len": 0,
    "logits_soft_cap": 0.0,
}
_ABSENT = (
    "custom_mask", "packed_custom_mask", "prefix_len_ptr", "token_pos_in_items_ptr",
    "max_item_len_ptr",
)  # fmt: skip


def _called_like(method: Callable, without: Sequence[str]) -> Callable[[Callable], Callable]:
    """Gives a method the parameters of another but for some; it receives them all by name."""

    def decorate(function: Callable) -> Callable:
        own = inspect.signature(method)
        parameters = [p for name, p in own.parameters.items() if name not in without]
        returned = inspect.signature(function).return_annotation
        signature = own.replace(parameters=parameters, return_annotation=returned)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options)
            given.apply_defaults()
            return function(**given.arguments)

        call.__signature__ = signature
        return call

    return decorate


class _Masked(NamedTuple):
    """A wrapper planned with the mask of some ranges."""

    wrapper: BatchPrefillWithPagedKVCacheWrapper
    ranges: torch.Tensor  # a copy


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper whose run() takes a span of keys for every query:

        keep = (causal and within causal_window_left) or (in the span and within range_window_left)

    The first run() after plan() with other ranges or other windows writes the mask out, plans
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

    _takes_cudnn = False

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
        validate.neutral("use_cuda_graph", use_cuda_graph, False)
        validate.neutral("pos_encoding_mode", pos_encoding_mode, "NONE")
        q_dtype = validate.query_dtype("q_data_type", q_data_type)
        super().__init__(
            float_workspace_buffer, kv_layout, False, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, backend=backend,
        )  # fmt: skip
        self._constructor_options = {
            "q_data_type": q_dtype,
            "kv_data_type": validate.kv_dtype("kv_data_type", kv_data_type, q_dtype),
            "o_data_type": validate.output_dtype("o_data_type", o_data_type, q_dtype),
            "head_dim_qk": validate.size("head_dim_qk", head_dim_qk),
            "head_dim_vo": validate.size("head_dim_vo", head_dim_vo),
        }
        self._plan_given: PagedPlanArguments | None = None
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
        batch_invariant: bool = False,
    ) -> None:
        """Takes the lengths of a batch, as BatchPrefillWithPagedKVCacheWrapper.plan().

        Args:
            custom_mask, packed_custom_mask, causal, window_left, prefix_len_ptr,
            token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, pos_encoding_mode,
            logits_soft_cap:
                their defaults only (of the cap also 0): run() has the mask and its windows.
            The others, and the errors, are those of BatchPrefillWithPagedKVCacheWrapper.plan().

        Raises ValueError, too: an argument contradicts the constructor.
        """
        a = self._arguments(locals())
        super()._make_plan(a)
        # The caller may change his arrays. Pages on a GPU stay there, as in every plan.
        names = ["qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"]
        if a.paged_kv_indices.is_cpu:
            names.append("paged_kv_indices")
        own = {name: getattr(a, name).to("cpu", copy=True) for name in names}
        self._plan_given = converted(a, PagedPlanArguments, **own)
        self._masked = {}

    begin_forward = plan

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces both workspaces, as in BatchPrefillWithPagedKVCacheWrapper; the work lists of
        masks stay in memory of their own."""
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._masked = {}

    @property
    def _last_masked(self) -> BatchPrefillWithPagedKVCacheWrapper | None:
        """The wrapper that was planned last for the mask of a run(); None before a run()."""
        last = next(reversed(self._masked.values()), None)
        return None if last is None else last.wrapper

    @property
    def variant(self) -> str | None:
        """The id of the kernel of the last run(); before a run() that of causal attention, before
        plan() None."""
        last = self._last_masked
        return super().variant if last is None else last.variant

    @property
    def _planned_backend(self) -> str:
        last = self._last_masked
        return super()._planned_backend if last is None else last._planned_backend

    @_called_like(plan, without=("non_blocking",))
    def workspace_size(self, **given: Any) -> tuple[int, int]:
        """(float_bytes, int_bytes) that plan() with these arguments uses at most. Plans nothing."""
        return super()._workspace_size(self._arguments(given))

    def _arguments(self, given: dict[str, Any]) -> PagedPlanArguments:
        """Returns the arguments of a paged plan without a mask."""
        for name, neutral in _NEUTRAL.items():
            validate.neutral(name, given[name], neutral)
        validate.absent(**{name: given[name] for name in _ABSENT})
        options = {name: given[name] for name in PagedPlanArguments.__slots__ if name in given}
        for name, fixed in self._constructor_options.items():
            if options[name] is None:
                options[name] = fixed
            elif name.endswith("type"):
                options[name] = validate.dtype(name, options[name])
        check_constructor_options(self._constructor_options, options)
        options |= {"head_dim": options.pop("head_dim_qk"), "causal": True}
        return PagedPlanArguments(**options)

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
            The others, the result and the errors are those of
            BatchPrefillWithPagedKVCacheWrapper.run().

        Raises RuntimeError, too: the stream is being captured.
        """
        validate.one_cache((bidirectional_ranges,))
        known = {"rows of q": validate.is_tensor("q", q).shape[0]}
        ranges = validate.conforms(
            "bidirectional_ranges", bidirectional_ranges, "ranges", q.device, known
        )
        windows = (
            max(validate.size("causal_window_left", causal_window_left), -1),
            max(validate.size("range_window_left", range_window_left), 0),
        )
        return self._with_mask(ranges, windows).run(
            q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
            q_scale=q_scale, out=out, lse=lse, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    @_called_like(run, without=("out", "lse", "return_lse"))
    def forward(self, **given: Any) -> torch.Tensor:
        """run(), whose options it has."""
        return self.run(**given)

    @_called_like(run, without=("out", "lse", "return_lse"))
    def forward_return_lse(self, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run(return_lse=True, **given)

    @torch_modes.eager
    def _with_mask(
        self, ranges: torch.Tensor, windows: tuple[int, int]
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        """Returns a wrapper planned with the mask of these ranges and windows."""
        batch = self._current().request.batch
        if self._plan.workspace.device_stream.is_capturing():
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
        wrapper._make_plan(
            converted(self._plan_given, PagedPlanArguments, causal=False, custom_mask=mask)
        )
        others = [(key, one) for key, one in self._masked.items() if key != windows]
        kept = dict(others[-_WINDOWS_KEPT + 1 :])
        self._masked = {**kept, windows: _Masked(wrapper, ranges.clone())}
        return wrapper
