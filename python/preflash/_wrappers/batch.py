"""Base of the paged and the ragged wrapper: plan once, run for many layers, select again."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import lengths as _lengths
from .._check import torch_modes, validate
from .._check.arguments import (
    NO_ITEMS,
    KvCache,
    Result,
    RunOptions,
    Scale,
    converted,
    per_head_of,
    scales_of,
    taken_by_position,
)
from .._check.calls import BatchArguments, ForwardArguments
from .._check.lengths import IndexArrays
from .._check.options import batch_options
from .._check.outputs import Outputs, run_outputs
from .._check.request import Request
from .._check.scales import Scales, folded_scales, softmax_scale
from .._check.tensors import check_per_head
from .._compat.cudnn_offsets import to_tokens
from .._compat.engine_attributes import EngineAttributes
from .._device import backends
from .._device.workspace import check_apart, check_buffer
from .._plan import masks, pipeline, prepass
from .._plan.pipeline import ArrayCopy
from .._run.variant import memory_with, new_workspace
from .._wrappers import compile_ops
from . import graph as _graph
from .graph import GraphMode
from .options import check_constructor_options, constructor_options, with_forward
from .plan import CapturedBuffers, Plan

# Placeholder skip factor of a plan; run() passes the real one, which counts unless it is 0 in
# float32.
_ANY_FACTOR = 2.0**-126

# Numbers that repeat what the lengths of one batch are.
_HINTS = ("max_token_per_sequence", "max_sequence_kv", "uniform_q_len")

CopyIn = Callable[[], list[ArrayCopy]]  # what goes into the buffers of CUDA graphs


class ForwardOptions(NamedTuple):
    """The options of a forward()."""

    of_plan: _core.AttentionOptions
    options: _core.AttentionOptions
    scales: Scales
    forward: Mapping[str, Any]  # those that replace the plan's


class BatchPrefillWrapper(EngineAttributes):
    """Base of the public wrappers. Subclasses turn arguments into a batch and a (k, v) pair."""

    _takes_cudnn = True  # backend="cudnn": plan() also takes offsets in elements
    _constructor_options: dict[str, Any] | None = None  # options that plan() must not contradict
    _by_position: tuple[str, ...] = ()  # arguments of run() after the tensors
    _repeat: _core.RepeatedPlan | None = None  # of the last plan()

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        **graph_buffers: Any,
    ) -> None:
        buffer = check_buffer("float_workspace_buffer", float_workspace_buffer)
        self._kv_layout = validate.one_of("kv_layout", kv_layout, validate.KV_LAYOUTS)
        self._requested_backend = backends.requested(backend, with_cudnn=self._takes_cudnn)
        for name, value in graph_buffers.items():
            # Documented as effective with use_cuda_graph only.
            if value is not None:
                validate.tensor(name, value)
        self._plan = Plan(new_workspace(buffer.device, buffer))
        self._graph: GraphMode | None = None
        self._given_buffers = graph_buffers
        self._in_elements = backend == backends.CUDNN  # with any PREFLASH_BACKEND
        self._graph_enabled = validate.flag("use_cuda_graph", use_cuda_graph)
        if self._awaits_buffers:
            self._take_graph_buffers()
        self._recorded_name = compile_ops.name_wrapper(self)
        self._forwards = _core.RememberedCalls()

    def __copy__(self) -> BatchPrefillWrapper:
        """Copies the wrapper, with the same plan and float workspace; each plans for itself."""
        workspace = self._plan.workspace
        where = "buffers of its constructor" if self._graph_enabled else None
        if where is None and workspace.int_room is not None:
            where = "int_workspace_buffer of reset_workspace_buffer()"
        if where is not None:
            raise TypeError(
                f"{type(self).__name__} plans into the {where}, which a copy would overwrite; "
                "construct another wrapper"
            )
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._recorded_name = compile_ops.name_wrapper(other)
        other._plan, other._repeat = self._plan.of_copy(), None
        if "run" in self.__dict__:
            other.run = types.MethodType(self.run.__func__, other)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds device memory and cannot be pickled or deep-copied; "
            "construct another wrapper and plan it"
        )

    def _take_graph_buffers(self) -> None:
        """Enters CUDA-graph mode: plan() keeps its arrays in the given buffers."""
        given = dict(self._given_buffers)
        batch_size = given.pop("fixed_batch_size", None)
        workspace = self._plan.workspace
        buffers = _graph.check_graph_buffers(given, workspace.float_tensor)
        if batch_size is not None and batch_size != buffers.batch_size:
            raise ValueError(
                f"_fixed_batch_size={batch_size}: the buffers are for batches of "
                f"{buffers.batch_size} requests"
            )
        self._graph = GraphMode(buffers, workspace.device_stream)

    # Planning.

    def _request(self, a: BatchArguments, arrays: IndexArrays | None = None) -> Request:
        """Checks the form of all arguments but hints and the mask. Values of indptr and
        last_page_len are checked in cpp/planner/validate.cpp. arrays: instead of those of `a`."""
        given = batch_options(a)
        options, workspace, graph = given.options, self._plan.workspace, self._graph
        device, kv_layout = workspace.device_stream.device, self._kv_layout
        if self._in_elements:
            buffers = {} if graph is None else graph.filled_by_plan()
            if to_tokens(a, options, device, buffers):
                kv_layout = "HND"
        batch, pages = _lengths.batch_lengths(
            arrays or _lengths.index_arrays(a),
            a,
            device,
            graph and graph.buffers.indices,
            workspace.known_uploader,
        )
        kv_lens = None
        if a.lengths_are_upper_bounds is not False:
            kv_lens = _lengths.upper_bounds(a, batch, device, given.masked)
        graph_rows = graph_mask_bytes = 0
        if graph is not None:
            graph.check_batch(batch)
            graph_rows = self._plan.graph_rows or max(batch.qo_end - batch.qo_begin, 1)
            graph_mask_bytes = graph.mask_bytes
        if self._constructor_options:
            check_constructor_options(self._constructor_options, constructor_options(a, options))
        if given.masked:
            batch.use_mask()
        scales = given.scales
        if a.sm_scale is not None:
            scales = Scales(softmax_scale(a.sm_scale, options), 1.0)
        items = NO_ITEMS if a.prefix_len_ptr is None else masks.items_of(a)
        return Request(
            prepass.applied_to(options), device, batch, pages, kv_layout, None, graph_rows,
            graph_mask_bytes, given.q_given, kv_lens, scales, given.causal, given.logits_soft_cap,
            items,
        )  # fmt: skip

    @torch_modes.eager
    def _make_plan(self, a: BatchArguments, arrays: IndexArrays | None = None) -> None:
        self._install(*self._drafted(a, arrays))

    @torch_modes.eager
    def _begin_forward(self, a: BatchArguments, arrays: IndexArrays | None = None) -> None:
        self._install(*self._drafted(a, arrays, self._plan.last_forward))

    def _drafted(
        self,
        a: BatchArguments,
        arrays: IndexArrays | None = None,
        forward: Mapping[str, Any] | None = None,
    ) -> tuple[Plan, CopyIn | None]:
        """Plans without changing the wrapper. Returns a plan that has passed every check, whose
        variants have no place yet, and with use_cuda_graph=True the call that fills the buffers.

        forward: plan for these options of a forward() that will follow, where they can be served;
        it is for forward() to refuse them, not for this call.
        """
        if self._graph_enabled:
            if self._graph is None:
                self._take_graph_buffers()
            self._graph.check_may_plan()
        before, graph, request = self._plan, self._graph, self._request(a, arrays)
        workspace, primary, default_variant, others = before.workspace, None, None, {}
        if forward is not None:
            other = with_forward(request.options, forward)
            if other != request.options:
                with contextlib.suppress(ValueError, NotImplementedError):
                    primary = self._planned_for(workspace, request._replace(options=other))
        if primary is None:
            primary = default_variant = self._planned_for(workspace, request)
        _lengths.check_hints(a, request)
        mask, copy_in = None, None
        if request.options.mask == _core.Mask.custom:
            mask = masks.source_of(a, request.batch, request.device)
        else:
            masks.check_alone(a)
        captured, shared = before.captured, before.shared
        if graph is None:
            # Without use_cuda_graph=True a graph goes on with the work list that it has captured.
            shared = before.shared_so_far()
            if mask is not None:
                mask = masks.owned_mask(*mask, request.batch, workspace.device_stream)
                request = request._replace(mask=mask)
                primary.requests = (request,)
        else:
            if mask is not None:
                graph.check_mask(request.batch)
                request = request._replace(mask=graph.buffers.mask)
                primary.requests = (request,)
            captured = before.captured_so_far()
            if captured:
                graph.check_captured(captured, request)
            for options, _ in captured:
                if options != primary.request.options:
                    again = request._replace(options=options)
                    others[options] = self._planned_for(workspace, again)
            default_variant = default_variant or others.get(request.options)
            arrays = arrays or _lengths.index_arrays(a)
            copy_in = functools.partial(graph.copy_in, arrays, request.batch, mask)
        plan = Plan(
            workspace, request, default_variant, primary, others, {}, shared, request.graph_rows,
            captured, before.last_forward,
        )  # fmt: skip
        return plan, copy_in

    def _planned_for(self, workspace: _core.Workspace, request: Request) -> _core.ExecutionPlan:
        """A variant without a place."""
        backend, last = self._requested_backend.name, self._plan.primary
        # Equal options need no new choice.
        if backend == "auto" and last is not None and last.request.options is request.options:
            backend = last.backend
        return pipeline.plan(workspace, backend, request)

    def _remember(self, a: Any, call: tuple[Any, list], given: tuple[tuple, dict]) -> None:
        """Keeps a call of plan() and its arguments, if one that differs in index arrays alone can
        be planned without Python. call: the function, and its index arrays (_core.RepeatedPlan)."""
        self._repeat, q_len = None, getattr(a, "q_len_per_req", None)
        if (
            not self._in_elements
            and all(getattr(a, hint, None) is None for hint in _HINTS)
            and (q_len is None or (type(q_len) is int and q_len == 1))
        ):
            repeat = _core.RepeatedPlan(*call, self._plan, self._graph)
            if repeat.remember(*given):
                self._repeat = repeat

    def _install(self, plan: Plan, copy_in: CopyIn | None = None) -> None:
        """Places and uploads a plan that has passed every check, and makes it the wrapper's."""
        before, graph, request, primary = self._plan, self._graph, plan.request, plan.primary
        variants = (primary, *plan.others.values())
        for variant in variants:
            self._place(plan.workspace, variant, plan.captured)
        copies = ()
        if graph is not None:
            # From here on the old plan has lost its buffers: an interrupted call leaves no plan.
            self._plan = before.dropped(plan.captured)
            graph.order_behind_runs(before)
            graph.reserve(plan.workspace, primary.plan.int_bytes)
            graph.kv_lens = request.kv_lens
            if copy_in is not None:
                copies = copy_in()
        then = functools.partial(setattr, self, "_plan", plan)
        pipeline.upload(plan.workspace, variants, then=then, copies=copies)
        if before.primary is not None and not before.primary.shared:
            before.workspace.give_back(before.primary)

    def _place(
        self,
        workspace: _core.Workspace,
        variant: _core.ExecutionPlan,
        captured: CapturedBuffers,
    ) -> None:
        """Places the plan where a CUDA graph captured it, else in memory that no graph reads."""
        where = None
        if captured:
            options = variant.request.options
            where = next((place for other, place in captured if other == options), None)
            if where is None:
                workspace = workspace.beside()
        variant.allocate_in(workspace, where)
        if self._graph is not None and _core.debugging():
            check_buffers = self._graph.check_buffers
            variant.before_run = functools.partial(check_buffers, variant.request.batch)

    def _current(self) -> Plan:
        """The plan of the last plan()."""
        plan = self._plan
        if plan.request is None:
            raise ValueError("run() before plan(): call plan() with the lengths of the batch first")
        return plan

    def _select(self, plan: Plan, options: _core.AttentionOptions) -> _core.ExecutionPlan:
        """The variant for the planned batch with other options; planned when first asked for."""
        if options == plan.primary.request.options:
            return plan.primary
        found = plan.others.get(options)
        if found is None:
            workspace = plan.workspace.beside()
            found = self._planned_for(workspace, plan.request._replace(options=options))
            if self._graph is not None and workspace.device_stream.is_capturing():
                self._graph.place_beside_capture(workspace, found)
            else:
                self._place(workspace, found, ())
                pipeline.upload(workspace, (found,))
            plan.keep(options, found)
        return found

    def _workspace_size(
        self, a: BatchArguments, arrays: IndexArrays | None = None
    ) -> tuple[int, int]:
        name = self._requested_backend.name
        if self._awaits_buffers:
            self._take_graph_buffers()
        return pipeline.workspace_size(name, self._request(a, arrays))

    # Running.

    def _run(self, q: torch.Tensor, kv: KvCache, given: RunOptions, outputs: Outputs) -> Result:
        """A run() that the subclass does not send to _run_quick(). outputs: not checked."""
        if given.extra:
            given, return_lse = taken_by_position(given, outputs.return_lse, self._by_position)
            outputs = outputs._replace(return_lse=return_lse)
        if outputs.return_lse is None:
            outputs = outputs._replace(return_lse=False)
        return self._run_given(q, kv, given, outputs)

    def _run_given(
        self,
        q: torch.Tensor,
        kv: KvCache,
        given: RunOptions,
        outputs: Outputs,
        sm_scale: Scale = None,
    ) -> Result:
        """A run() whose positional arguments have names. outputs: not checked."""
        if given.extra:
            validate.nothing_more("run", given.extra)
        return self._run_with(q, kv, given, run_outputs(*outputs), sm_scale)

    def _run_with(
        self, q: torch.Tensor, kv: KvCache, a: RunOptions, outputs: Outputs, sm_scale: Scale
    ) -> Result:
        """A run() off the fast path: with options, without a default variant, or traced. sm_scale:
        None is the plan's."""
        if torch_modes.traced():
            return compile_ops.run(self._recorded_name, q, kv, a, outputs, sm_scale)
        per_head = per_head_of(a)
        skip_factor = validate.skip_factor(a.skip_softmax_threshold_scale_factor)
        plan = self._current()
        options = asked = plan.request.options
        if a.window_left is not None:
            window_left = validate.window_left("window_left", a.window_left)
            options = options.replace(window_left=window_left)
        if skip_factor > 0.0:
            options = options.replace(skip_factor=_ANY_FACTOR)
        variant = plan.default_variant
        if variant is None or options is not asked:
            variant = self._select(plan, options)
            if type(a.window_left) is int and skip_factor == 0.0:
                plan.keep_window(a.window_left, variant)
        if per_head.scaled and variant.plan.has_prepass:
            check_per_head(per_head, options, self.device, plan.request.q_given)
            variant = self._select(plan, prepass.without(options))
        logits = plan.request.scales.logits
        if sm_scale is not None:
            logits = softmax_scale(sm_scale, options)
        scales = folded_scales(logits, scales_of(a), options)
        memory = per_head if per_head.given else None
        if skip_factor > 0.0:
            memory = memory_with(variant, per_head, skip_factor)
        result = variant(q, kv, scales, outputs, memory)
        if plan.default_variant is None and options is asked and self._plan is plan:
            # The caller uses run(): begin_forward() is plan() again.
            self._plan = plan._replace(default_variant=variant, last_forward=None)
        return result

    @staticmethod
    def _run_quick(
        plan: Plan,
        variant: _core.ExecutionPlan,
        q: torch.Tensor,
        kv: KvCache,
        scales: tuple,
        sinks: Any,
        outputs: Outputs,
    ) -> Result:
        """Fast path: runs a known variant, while nothing records. scales: GivenScales."""
        factors, (q_scale, k_scale, v_scale) = plan.request.scales, scales
        if q_scale is not None or k_scale is not None or v_scale is not None:
            factors = folded_scales(factors.logits, scales, plan.request.options)
        heads = None if sinks is None else (sinks, None, None, None)
        return variant(q, kv, factors, outputs, heads)

    def _forward(self, q: torch.Tensor, kv: KvCache, given: Any, outputs: Outputs) -> Result:
        """The deprecated call: its own options count, defaults included, not those of plan()."""
        if "run" in self.__dict__:  # with jit_args of sinks, which would be lost
            raise TypeError(
                "forward() takes no sink, and the wrapper was constructed with jit_args of "
                "'AttentionSink': call run(..., sink, sm_scale)"
            )
        if torch_modes.traced():
            a = converted(given, ForwardArguments)
            return compile_ops.forward(self._recorded_name, q, kv, a, outputs)
        return self._run_forward(self._forward_options(given), q, kv, outputs)

    def _forward_options(self, given: Any) -> ForwardOptions:
        a = converted(given, ForwardArguments)
        encoding = validate.position_encoding(a.pos_encoding_mode, a.rope_scale, a.rope_theta)
        validate.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
        validate.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
        forward = {
            "causal": validate.flag("causal", a.causal),
            "window_left": validate.window_left("window_left", a.window_left),
            "soft_cap": validate.soft_cap("logits_soft_cap", a.logits_soft_cap),
            **encoding._asdict(),
        }
        of_plan = self._current().request.options
        options = with_forward(of_plan, forward)
        scales = folded_scales(softmax_scale(a.sm_scale, options), scales_of(a), options)
        return ForwardOptions(of_plan, options, scales, forward)

    def _run_forward(
        self, given: ForwardOptions, q: torch.Tensor, kv: KvCache, outputs: Outputs
    ) -> Result:
        variant = self._select(self._plan, given.options)
        result = variant(q, kv, given.scales, outputs, None)
        if self._plan.last_forward != given.forward:
            self._plan = self._plan._replace(last_forward=given.forward)
        return result

    def _forward_again(self, call: object, given: tuple, options: dict) -> ForwardOptions | None:
        """The options of an earlier forward() with the same arguments but for tensors."""
        found, request = self._forwards.find(call, given, options), self._plan.request
        if found is None or request is None or found.of_plan is not request.options:
            return None
        return found

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: every kernel takes strides of k and of v, and none is loaded late."""
        validate.one_of("variant", variant, ("independent",))

    def end_forward(self) -> None:
        """Does nothing; FlashInfer has this method."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces both workspaces. What is planned is planned again into the new ones.

        Args:
            float_workspace_buffer: scratch memory for split-KV partials, on the wrapper's device.
            int_workspace_buffer: memory for the work list, on the wrapper's device. It is used as
                it is and never grows; workspace_size() tells how many bytes a plan needs.

        Raises:
            ValueError: another device, not contiguous, not 16-byte aligned, not apart, or too small
            for what is planned; the wrapper then keeps its buffers.
            TypeError: not tensors.
        """
        self._drafted_reset(float_workspace_buffer, int_workspace_buffer)()

    def _drafted_reset(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> Callable[[], None]:
        """Drafts what is planned for the new workspace and returns what replaces both. Raises all
        that a reset raises, and changes nothing."""
        float_buffer = check_buffer("float_workspace_buffer", float_workspace_buffer, self.device)
        int_buffer = check_buffer("int_workspace_buffer", int_workspace_buffer, self.device)
        check_apart(float_workspace_buffer=float_buffer, int_workspace_buffer=int_buffer)
        workspace = new_workspace(self.device, float_buffer, int_buffer)
        before = self._plan
        if self._graph is not None and before.captured_so_far():
            raise ValueError(
                "reset_workspace_buffer(): a CUDA graph has captured a run(), which holds on to "
                "the workspaces; construct another wrapper"
            )
        plan = before._replace(workspace=workspace)
        if before.request is None:
            return functools.partial(setattr, self, "_plan", plan)
        variant = self._planned_for(workspace, before.request)
        shared = before.shared if self._graph is not None else before.shared_so_far()
        plan = plan._replace(
            default_variant=variant, primary=variant, others={}, windows={}, shared=shared
        )
        return functools.partial(self._install, plan)

    # Public properties.

    @property
    def device(self) -> torch.device:
        """Device of the workspace and of every tensor of run()."""
        return self._plan.workspace.device_stream.device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph_enabled

    @property
    def variant(self) -> str | None:
        """The id of the kernel that plan() chose; None before."""
        primary = self._plan.primary
        return None if primary is None else primary.plan.id

    def __repr__(self) -> str:
        name = type(self).__name__
        where = f"kv_layout={self._kv_layout!r}, device='{self.device}'"
        request = self._plan.request
        if request is None:
            return f"{name}(backend={self._requested_backend!r}, {where}, not planned)"
        return (
            f"{name}(backend={self._planned_backend!r}{self._requested_backend.override}, "
            f"variant={self.variant!r}, {where}, "
            f"batch_size={request.batch.num_requests})"
        )
