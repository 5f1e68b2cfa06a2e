"""Merging attention over disjoint sets of keys: out = sum_i 2^(s_i) v_i / sum_i 2^(s_i).

s is the base-2 log-sum-exp that run(return_lse=True) returns. A state with s = -inf has no weight,
whatever its v holds; where every state has, the result is 0 and -inf. (Cascade inference and the
recursive form of attention: FlashInfer, arXiv:2501.01005.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from . import _core
from ._check import dtypes, torch_modes, validate
from ._check.arguments import KvCache, Scale, converted
from ._check.calls import CascadePlanArguments, PagedPlanArguments
from ._check.names import tells_nearest
from ._compat.signatures import takes
from ._device.stream import DeviceStream
from ._device.workspace import check_levels_apart
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

_State = tuple[torch.Tensor, torch.Tensor]  # v and s

# Arguments of plan() of one level, and the names of their lists in plan() of the cascade.
_TABLES = {
    "qo_indptr": "qo_indptr_arr",
    "paged_kv_indptr": "paged_kv_indptr_arr",
    "paged_kv_indices": "paged_kv_indices_arr",
    "paged_kv_last_page_len": "paged_kv_last_page_len",
}


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two states of every token and head.

    Args:
        v_a, v_b: [seq_len, num_heads, head_dim] float16, bfloat16 or float32.
        s_a, s_b: [seq_len, num_heads], base 2, float32 or another float dtype, converted to it.

    Returns:
        v [seq_len, num_heads, head_dim] and s [seq_len, num_heads].

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: a gradient is wanted, or torch.jit.trace is recording.
    """
    if torch_modes.traced():
        return torch.ops.preflash.merge_state(v_a, s_a, v_b, s_b)
    torch_modes.forward_only(v_a, s_a, v_b, s_b)
    a = _checked("v_a", v_a, "s_a", s_a)
    _check_same("v_b", v_b, v_a)
    b = _checked("v_b", v_b, "s_b", s_b)
    return _merge(a, b)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merges another state into v and s.

    Args:
        v, s: [seq_len, num_heads, head_dim] and [seq_len, num_heads] float32, contiguous;
            overwritten.
        v_other, s_other: of the same shapes. They and the mask must not share memory with v or s,
            except that v_other may be v and s_other may be s. s_other may be of any float dtype.
        mask: [seq_len] bool or uint8; tokens where it is 0 stay as they are.

    Raises as merge_state(); nothing was written then.
    """
    if torch_modes.traced():
        torch.ops.preflash.merge_state_in_place(v, s, v_other, s_other, mask)
        return
    torch_modes.forward_only(v, s, v_other, s_other)
    _checked("v", v, "s", s)
    validate.conforms("v", v, "merged_v")
    validate.conforms("s", s, "merged_s")
    _check_same("v_other", v_other, v)
    other = _checked("v_other", v_other, "s_other", s_other)
    if mask is not None:
        known = {"seq_len": v.shape[0]}
        mask = validate.conforms("mask", mask, "merge_mask", v.device, known).contiguous()
    # Non-contiguous inputs are copies here. A state may be merged with itself: rows are read
    # before they are written.
    read = [("v_other", other[0]), ("s_other", other[1])]
    validate.apart([("v", v), ("s", s)], read if mask is None else [*read, ("mask", mask)])
    _merge((v, s), other, (v, s), mask)
    torch_modes.written(v, s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges any number of states of every token and head. No states give 0 and -inf.

    Args:
        v: [seq_len, num_states, num_heads, head_dim] float16, bfloat16 or float32.
        s: [seq_len, num_states, num_heads], base 2, float32 or another float dtype.

    Returns and raises as merge_state().
    """
    if torch_modes.traced():
        return torch.ops.preflash.merge_states(v, s)
    torch_modes.forward_only(v, s)
    v, s = _checked("v", v, "s", s, "states")
    if v.shape[1] == 0:
        tokens, _, heads, head_dim = v.shape
        return v.new_zeros((tokens, heads, head_dim)), s.new_full((tokens, heads), -torch.inf)
    return _merge((v, s))


def _checked(
    v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, rule: str = "state"
) -> _State:
    """A state, or states, as contiguous tensors."""
    validate.conforms(v_name, v, f"{rule}_v")
    if v.shape[-1] == 0:
        raise ValueError(f"{v_name} has shape {tuple(v.shape)}; must have a head_dim of 1 or more")
    dims = ("seq_len", "num_heads") if rule == "state" else ("seq_len", "num_states", "num_heads")
    known = dict(zip(dims, v.shape[:-1], strict=True))
    validate.conforms(s_name, s, f"{rule}_s", v.device, known)
    return v.contiguous(), s.to(torch.float32).contiguous()


def _check_same(name: str, value: torch.Tensor, other: torch.Tensor) -> None:
    """Checks that the values of two states have one shape, dtype and device."""
    known = dict(zip(("seq_len", "num_heads", "head_dim"), other.shape, strict=True))
    validate.conforms(name, value, "other_v", other.device, {**known, "state_dtype": other.dtype})


def _merge(
    states: _State,
    other: _State | None = None,
    into: _State | None = None,
    mask: torch.Tensor | None = None,
) -> _State:
    """Merges two states per token, or all states of each token; into a new one by default."""
    v, s = states
    tokens, heads, head_dim = v.shape[0], v.shape[-2], v.shape[-1]
    if into is None:
        into = v.new_empty((tokens, heads, head_dim)), s.new_empty((tokens, heads))
    if into[0].numel() == 0:
        return into
    num_states = v.shape[1] if other is None else 2
    params = _core.MergeStatesParams(
        dtypes.CORE_DTYPES[v.dtype], num_states, (tokens, heads, head_dim)
    )
    others = (0, 0) if other is None else map(validate.address, other)
    params.set_inputs(*map(validate.address, states), *others)
    params.set_outputs(*map(validate.address, into), 0 if mask is None else validate.address(mask))
    params.launch(DeviceStream(v.device).target())
    return into


class MultiLevelCascadeAttentionWrapper:
    """Attention over keys that groups of requests share, level by level, and a merge.

    Every level is a page table of its own over one pool: on the first, few requests with many
    queries each (those that share a prefix), on the last, one request per sequence. Every query is
    part of every level.

    Args:
        num_levels: at least 1.
        float_workspace_buffer, kv_layout: as in BatchPrefillWithPagedKVCacheWrapper; the levels
            run one after another and share the buffer.
        use_cuda_graph: as in BatchPrefillWithPagedKVCacheWrapper, with one buffer of each kind per
            level. Without it the lists of buffers have no effect.

    Raises: TypeError, ValueError: an argument is wrong.
    """

    @tells_nearest
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        num_levels = validate.size("num_levels", num_levels)
        of_levels = [
            [None] * num_levels if buffers is None else _per_level(name, buffers, num_levels)
            for name, buffers in (
                ("qo_indptr_buf_arr", qo_indptr_buf_arr),
                ("paged_kv_indptr_buf_arr", paged_kv_indptr_buf_arr),
                ("paged_kv_indices_buf_arr", paged_kv_indices_buf_arr),
                ("paged_kv_last_page_len_buf_arr", paged_kv_last_page_len_buf_arr),
            )
        ]
        self._num_levels = num_levels
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, *buffers
            )
            for buffers in zip(*of_levels, strict=True)
        ]
        if use_cuda_graph:
            check_levels_apart("paged_kv_indices_buf_arr", paged_kv_indices_buf_arr)
        self._in_step = True  # False: the levels' plans are not of one call

    def __copy__(self) -> MultiLevelCascadeAttentionWrapper:
        """Another wrapper with the same plan and float workspace; each plans for itself."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _levels=[copy.copy(level) for level in self._levels])
        return other

    @property
    def _batch_prefill_wrappers(self) -> list[BatchPrefillWithPagedKVCacheWrapper]:
        """The wrapper of each level, for callers that look into it, as they do at _num_levels."""
        return list(self._levels)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._levels[0].is_cuda_graph_enabled

    @property
    def variant(self) -> str | None:
        """The id of each level's kernel, in the order of the levels; None before plan()."""
        ids = [level.variant for level in self._levels]
        return None if None in ids or not self._in_step else ", ".join(ids)

    def __repr__(self) -> str:
        name, level = type(self).__name__, self._levels[0]
        planned = "not planned" if self.variant is None else f"variant={self.variant!r}"
        where = f"kv_layout={level._kv_layout!r}, device='{level.device}'"
        return f"{name}(num_levels={self._num_levels}, {where}, {planned})"

    prewarm_paged_kv_stride_variant = (
        BatchPrefillWithPagedKVCacheWrapper.prewarm_paged_kv_stride_variant
    )

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replaces the float workspace, and every level's int workspace, as in
        BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer()."""
        buffers = _per_level("int_workspace_buffers", int_workspace_buffers, self._num_levels)
        resets = [
            level._drafted_reset(float_workspace_buffer, int_buffer)
            for level, int_buffer in zip(self._levels, buffers, strict=True)
        ]
        check_levels_apart("int_workspace_buffers", buffers)
        for reset in resets:
            reset()

    @takes(CascadePlanArguments)
    @torch_modes.eager
    def plan(self, a: CascadePlanArguments) -> None:
        """Plans every level.

        Args:
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: one
                array per level, each as in BatchPrefillWithPagedKVCacheWrapper.plan(). All
                qo_indptr begin with one value and end with one, the queries of the batch.
            causal: of the last level; the others' keys all come before.
            seq_lens_arr, lengths_are_upper_bounds: seq_lens of each level, as in
                BatchPrefillWithPagedKVCacheWrapper.plan(); None for a level whose lengths of keys
                are exact.
            window_left, pos_encoding_mode: -1 and "NONE" only with more than one level: a level
                does not know how many keys come after its own.
            The others, and the errors, are those of BatchPrefillWithPagedKVCacheWrapper.plan();
            the wrapper keeps the plans it had.
        """
        count = self._num_levels
        arrays = [_per_level(name, getattr(a, name), count) for name in _TABLES.values()]
        if count > 1:
            _check_free_of_distances(a.window_left, a.pos_encoding_mode)
        seq_lens = _lens_per_level(a.seq_lens_arr, a.lengths_are_upper_bounds, count)
        drafted = []
        for level, lens, *of_level in zip(self._levels, seq_lens, *arrays, strict=True):
            table = dict(zip(_TABLES, of_level, strict=True))
            table["causal"] = a.causal if level is self._levels[-1] else False
            bounded = a.lengths_are_upper_bounds and lens is not None
            table |= {"seq_lens": lens, "lengths_are_upper_bounds": bounded}
            drafted.append(level._drafted(converted(a, PagedPlanArguments, **table)))
        first, *others = (level_plan.request.batch for level_plan, _ in drafted)
        for i, batch in enumerate(others, start=1):
            if (batch.qo_begin, batch.qo_end) != (first.qo_begin, first.qo_end):
                raise ValueError(
                    f"qo_indptr_arr[{i}] goes from {batch.qo_begin} to {batch.qo_end} and "
                    f"qo_indptr_arr[0] from {first.qo_begin} to {first.qo_end}; every level must "
                    "have the same queries"
                )
        # Nothing is refused from here on, but an interrupt may leave levels with the batch before.
        self._in_step = False
        for level, (level_plan, copy_in) in zip(self._levels, drafted, strict=True):
            level._install(level_plan, copy_in)
        self._in_step = True

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: KvCache) -> torch.Tensor:
        """Attention over the keys of all levels: out [rows of q, num_qo_heads, head_dim]. Arguments
        and errors are those of BatchPrefillWithPagedKVCacheWrapper.run()."""
        if not self._in_step:
            raise ValueError("run() after a plan() that did not come to its end: call plan() again")
        return run_levels(self._levels, q, paged_kv_cache)

    forward = run

    end_forward = BatchPrefillWithPagedKVCacheWrapper.end_forward


def run_levels(
    levels: Sequence[BatchPrefillWithPagedKVCacheWrapper],
    q: torch.Tensor,
    paged_kv_cache: KvCache,
    *,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Runs planned wrappers over disjoint sets of keys and merges their results.

    Args:
        levels: wrappers whose plans have the same query rows.
        out: contiguous, as in BatchPrefillWithPagedKVCacheWrapper.run(); allocated if None.
        sinks: as there. The last level alone has them, so that each counts once.
        options: others of run(), for every level.

    Returns:
        out [rows of q, num_qo_heads, head_dim].
    """
    out, lse = levels[-1].run(q, paged_kv_cache, out=out, sinks=sinks, return_lse=True, **options)
    for level in levels[:-1]:
        other = level.run(q, paged_kv_cache, return_lse=True, **options)
        if torch_modes.traced() or not out.is_contiguous():
            merge_state_in_place(out, lse, *other)
        else:  # run() has checked both, which takes four fifths of a merge
            _merge((out, lse), other, (out, lse))
    return out


class _SharedPrefixWrapper:
    """Base of both shared-prefix wrappers: a wrapper for the requests' own pages, and a merge."""

    _kind: type[BatchPrefillWithPagedKVCacheWrapper]  # class of the requests' own wrapper

    @tells_nearest
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._own = self._kind(float_workspace_buffer, kv_layout)

    @property
    def variant(self) -> str | None:
        """The id of the kernel that begin_forward() chose for the requests' own pages; None before.
        forward() chooses that of the prefix."""
        return self._own.variant

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._own!r})"

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces both workspaces, as in BatchPrefillWithPagedKVCacheWrapper."""
        self._own.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    end_forward = BatchPrefillWithPagedKVCacheWrapper.end_forward

    def _with_prefix(self, own: _State, *qkv: torch.Tensor, sm_scale: Scale = None) -> torch.Tensor:
        """The requests' own attention, merged in place with that over the prefix."""
        out, lse = own
        prefix = single_prefill_with_kv_cache_return_lse(
            *qkv, kv_layout=self._own._kv_layout, sm_scale=sm_scale, o_dtype=out.dtype
        )
        merge_state_in_place(out, lse, *prefix)
        return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention over a prefix that all requests share and over pages of their own.

    MultiLevelCascadeAttentionWrapper does the same with the prefix in pages, too.

    Args:
        float_workspace_buffer, kv_layout: as in BatchPrefillWithPagedKVCacheWrapper, errors too;
            kv_layout is that of the prefix, too.
    """

    _kind = BatchDecodeWithPagedKVCacheWrapper

    @tells_nearest
    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
        *,
        seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False,
    ) -> None:
        """Plans the requests' own pages; the arguments are those of
        BatchDecodeWithPagedKVCacheWrapper.plan() and raise the same."""
        self._own.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim, page_size, data_type=data_type, seq_lens=seq_lens,
            lengths_are_upper_bounds=lengths_are_upper_bounds,
        )  # fmt: skip

    @tells_nearest
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: KvCache,
    ) -> torch.Tensor:
        """Attention over the prefix and the requests' own keys.

        Args:
            q: [batch_size, num_qo_heads, head_dim].
            k_shared, v_shared: [prefix length, num_kv_heads, head_dim], or with "HND"
                [num_kv_heads, prefix length, head_dim].
            unique_kv_cache: as in BatchPrefillWithPagedKVCacheWrapper.run().

        Returns:
            out [batch_size, num_qo_heads, head_dim].

        Raises as BatchPrefillWithPagedKVCacheWrapper.run() and single_prefill_with_kv_cache.
        """
        own = self._own.run(q, unique_kv_cache, return_lse=True)
        return self._with_prefix(own, q, k_shared, v_shared)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """BatchDecodeWithSharedPrefixPagedKVCacheWrapper for any number of queries per request; the
    constructor takes and raises the same."""

    _kind = BatchPrefillWithPagedKVCacheWrapper

    prewarm_paged_kv_stride_variant = (
        BatchPrefillWithPagedKVCacheWrapper.prewarm_paged_kv_stride_variant
    )

    @tells_nearest
    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False,
    ) -> None:
        """Plans the requests' own pages; the arguments are those of
        BatchPrefillWithPagedKVCacheWrapper.plan() and raise the same."""
        self._own.begin_forward(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim, page_size, q_data_type=q_data_type, kv_data_type=kv_data_type,
            seq_lens=seq_lens, lengths_are_upper_bounds=lengths_are_upper_bounds,
        )  # fmt: skip

    @tells_nearest
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: KvCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | torch.Tensor | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward(), which raises the same.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim].
            causal: among the requests' own keys; those of the prefix come before.
            use_fp16_qk_reduction: a permission.
            sm_scale: factor of the logits, 1/sqrt(head_dim) by default.
            rope_scale, rope_theta: None, or 1 and 10000: keys have no positions here.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim].
        """
        own = self._own.forward_return_lse(
            q, unique_kv_cache, causal, use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self._with_prefix(own, q, k_shared, v_shared, sm_scale=sm_scale)


def _per_level(name: str, arrays: Any, num_levels: int) -> Sequence[torch.Tensor]:
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"{name} must be a list of tensors; got {type(arrays).__name__}")
    if len(arrays) != num_levels:
        raise ValueError(f"{name} has {len(arrays)} tensors; must have num_levels = {num_levels}")
    for i, array in enumerate(arrays):
        validate.is_tensor(f"{name}[{i}]", array)
    return arrays


def _lens_per_level(
    arrays: Any, lengths_are_upper_bounds: Any, num_levels: int
) -> Sequence[torch.Tensor | None]:
    """seq_lens of each level; None: its lengths of keys are exact."""
    validate.flag("lengths_are_upper_bounds", lengths_are_upper_bounds)
    if arrays is None:
        arrays = [None] * num_levels
    if not isinstance(arrays, (list, tuple)) or len(arrays) != num_levels:
        raise TypeError(f"seq_lens_arr must be a list of num_levels = {num_levels} tensors or None")
    if lengths_are_upper_bounds and all(lens is None for lens in arrays):
        raise ValueError(
            "lengths_are_upper_bounds=True and no seq_lens_arr: pass a list that has int32 "
            "[batch_size] on the wrapper's device for each level of upper bounds"
        )
    return arrays


def _check_free_of_distances(window_left: int, pos_encoding_mode: str) -> None:
    why = "a level does not know how many keys come after its own, so it cannot tell"
    if validate.window_left("window_left", window_left) >= 0:
        raise NotImplementedError(
            f"window_left={window_left}: {why} where a window begins; use -1, or one level"
        )
    if validate.one_of("pos_encoding_mode", pos_encoding_mode, validate.ENCODING_MODES) != "NONE":
        raise NotImplementedError(
            f"pos_encoding_mode={pos_encoding_mode!r}: {why} positions; use 'NONE', or one level"
        )
