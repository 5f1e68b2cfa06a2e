"""Prefill beside decode: both sides of a run in one launch, or in two where no kernel takes both or
two are faster. What run() brings is planned together with the decode side when first seen, and
kept: further layers only launch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import torch_modes, validate
from .._check.arguments import Result
from .._check.request import Request
from .._check.tensors import kv_of, refuse_shared
from .._compat.engine_attributes import forwards
from .._device import backends
from .._plan import masks, pipeline
from .._run.variant import SIDES, SegmentRun, error_context, memory_with_mask
from .._wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from .._wrappers.plan import Plan

_PLANS_KEPT = 64
_forced_apart = False  # two launches whatever the sides are, for tests


class TwoLaunches:
    """A launch for each side, one after the other: what no kernel runs as one, or not as fast."""

    def __init__(self, prefill: _core.ExecutionPlan, decode: _core.ExecutionPlan) -> None:
        self._variants = (prefill, decode)

    @property
    def prefill(self) -> _core.ExecutionPlan:
        return self._variants[0]

    @property
    def id(self) -> str:
        return ", ".join(variant.id for variant in self._variants)

    @property
    def backend(self) -> backends.Backend:
        """Backend of the decode side; only with "auto" may the prefill side's differ."""
        return self._variants[1].backend

    @property
    def shared(self) -> bool:
        """True if a CUDA graph may still run the prefill, which has no other owner. The wrapper
        owns the decode side, which may be captured with other prefills too."""
        return self._variants[0].shared

    def __call__(self, *given: Any) -> tuple[Result, ...]:
        """Launches the prefill side, then the decode side. First refuses what is wrong on either
        side, and what one launch of both would refuse."""
        size = len(SegmentRun._fields)
        runs = [SegmentRun(*given[:size]), SegmentRun(*given[size:])]
        sides = list(zip(SIDES, self._variants, runs, strict=True))
        for side, variant, run in sides:
            with error_context(side):
                variant.check_run(*run)
        self._check_apart(sides)
        results = []
        for side, variant, run in sides:
            with error_context(side):
                results.append(variant(*run))
        return tuple(results)

    def _check_apart(self, sides: list[tuple[str, _core.ExecutionPlan, SegmentRun]]) -> None:
        """Raises ValueError if a caller's output shares memory with a tensor of either side."""
        if all(run.outputs.out is None and run.outputs.lse is None for _, _, run in sides):
            return
        written, read = [], []
        for side, variant, run in sides:
            rows = variant.request.qo_tokens  # rows after these are padding
            out, lse = run.outputs.out, run.outputs.lse
            if out is not None:
                written.append((side, "out", out[:rows]))
            if lse is not None:
                by_token = run.outputs.lse_layout == "NH"
                written.append((side, "lse", lse[:rows] if by_token else lse[:, :rows]))
            k, v = kv_of(run.kv)
            read += [(side, "q", run.q[:rows]), (side, "k", k), (side, "v", v)]
        scratch = self._variants[1].workspace.float_tensor  # shared by both sides
        for i, (side, name, value) in enumerate(written):
            if scratch is not None:
                refuse_shared(f"{side}'s {name}", value, "float_workspace_buffer", scratch)
            for other_side, other_name, other in (*read, *written[i + 1 :]):
                # q itself may be written to: the kernel that reads it knows whether.
                if side != other_side or (name, other_name) != ("out", "q"):
                    mine, others = f"{side}'s {name}", f"{other_side}'s {other_name}"
                    refuse_shared(mine, value, others, other)


class PodPlan(NamedTuple):
    """Plan of one kind of prefill together with the planned decode batch."""

    of: Plan | None  # the decode side's; None: a plan with other options came since
    prefill: Request
    decode_options: _core.AttentionOptions
    workspace: _core.Workspace
    launch: _core.ExecutionPlan | TwoLaunches

    @property
    def launches(self) -> int:
        return 2 if isinstance(self.launch, TwoLaunches) else 1


class PodPlanCache:
    """Plans of one wrapper for both sides, made in the workspace of its decode side."""

    def __init__(self, decode: BatchPrefillWithPagedKVCacheWrapper) -> None:
        self._decode = decode
        self._kept: OrderedDict[Hashable, PodPlan] = OrderedDict()
        # Plans that CUDA graphs may replay, by key and options of the decode side: kept for good.
        self._captured: dict[tuple[Hashable, _core.AttentionOptions], PodPlan] = {}
        self._replaced: list[PodPlan] = []  # captured too, under keys that have a newer plan
        self.last: PodPlan | None = None

    def find(self, key: Hashable, decode: Plan) -> PodPlan | None:
        found = self._kept.get(key)
        return found if found is not None and found.of is decode else None

    def make(self, key: Hashable, prefill: Request, decode: Plan) -> PodPlan:
        """Plans both sides. Raises all that a plan() raises once its arguments are checked."""
        torch_modes.not_traced()
        workspace = decode.workspace
        if workspace.device_stream.is_capturing():
            raise RuntimeError(
                "this run() needs a plan, which cannot be made while its stream is being captured "
                "into a CUDA graph: call it once before the capture, with a prefill of the same "
                "shapes and options"
            )
        workspace = workspace.beside()
        launch = self._launch(prefill, decode, workspace)
        pod_plan = PodPlan(decode, prefill, decode.request.options, workspace, launch)
        self._kept[key] = pod_plan
        self._kept.move_to_end(key)
        if len(self._kept) > _PLANS_KEPT:
            self._kept.popitem(last=False)
        return pod_plan

    def run(
        self, key: Hashable, pod_plan: PodPlan, prefill: SegmentRun, decode: SegmentRun
    ) -> tuple[Result, ...]:
        graph = self._decode._graph
        if graph is not None and _core.debugging():
            graph.check_buffers(self._decode._current().request.batch)
        was_shared = pod_plan.launch.shared
        results = pod_plan.launch(*prefill, *decode)
        if pod_plan.launch.shared and not was_shared:
            captured = (key, pod_plan.decode_options)
            before = self._captured.get(captured)
            if before is not None:
                self._replaced.append(before)
            self._captured[captured] = pod_plan
        self.last = pod_plan
        return results

    def forget(self) -> None:
        """A new plan() makes the work lists of the last one useless, except those of graphs."""
        kept, self._kept = self._kept, OrderedDict()
        self.last = None
        workspace = self._decode._plan.workspace
        for pod_plan in kept.values():
            if isinstance(pod_plan.launch, _core.ExecutionPlan) and not pod_plan.launch.shared:
                workspace.give_back(pod_plan.launch)

    # use_cuda_graph=True: plan() changes what a captured run() replays, but for its options.

    def joined(self) -> Iterator[tuple[Hashable, PodPlan]]:
        """Captured plans of one launch for both sides, which reads the decode side's lengths."""
        for (key, _), pod_plan in self._captured.items():
            if isinstance(pod_plan.launch, _core.ExecutionPlan):
                yield key, pod_plan

    def drafts(self, decode: Request) -> list[tuple[Hashable, PodPlan, _core.ExecutionPlan]]:
        """The plans of everything captured, for another decode batch. Changes nothing; what the
        current stream does from now on comes after the runs of other streams."""
        joined, found = list(self.joined()), []
        if joined:
            self._decode._graph.check_kv_lens(decode.kv_lens)
        for _, pod_plan in joined:
            pod_plan.launch.plan_buffer.check_captured(1, decode.batch, decode.largest_page)
        for key, pod_plan in joined:
            sides, backend = _both_sides(pod_plan, decode), pod_plan.launch.backend
            found.append((key, pod_plan, pipeline.plan(pod_plan.workspace, backend, *sides)))
        for _, pod_plan in joined:
            _core.order_behind_users([pod_plan.launch], [], pod_plan.workspace)
        return found

    def write(
        self, drafts: list[tuple[Hashable, PodPlan, _core.ExecutionPlan]], decode: Plan
    ) -> None:
        for key, pod_plan, launch in drafts:
            launch.allocate_in(pod_plan.workspace, pod_plan.launch.plan_buffer)
            pipeline.upload(pod_plan.workspace, (launch,))
            as_planned = pod_plan.decode_options == decode.request.options
            pod_plan = pod_plan._replace(of=decode if as_planned else None, launch=launch)
            self._captured[key, pod_plan.decode_options] = pod_plan
            if as_planned:
                self._kept[key] = pod_plan

    def _launch(
        self, prefill: Request, decode: Plan, workspace: _core.Workspace
    ) -> _core.ExecutionPlan | TwoLaunches:
        """The one place that decides whether both sides are one launch. Kernels of both have tiles
        of their own, so that batch-invariant sides are two."""
        sides, name = (prefill, decode.request), self._decode._requested_backend.name
        apart = _forced_apart or decode.request.options.disable_split
        apart = apart or any(side.batch.max_qo_len == 0 for side in sides)
        backend = backends.choose(name, prefill.device, *(side.options for side in sides))
        if (
            not apart
            and backend.why_not_together(*sides) is None
            and not backend.prefer_two_launches(*sides)
        ):
            return pipeline.made(workspace, backend, *sides)
        with error_context(SIDES[0]):
            variant = pipeline.made(workspace, name, prefill._replace(graph_rows=0))
        return TwoLaunches(variant, decode.primary)


def _both_sides(pod_plan: PodPlan, decode: Request) -> list[Request]:
    """Requests of both sides as a graph captured them, with the lengths of another decode batch."""
    return [pod_plan.prefill, decode._replace(options=pod_plan.decode_options)]


@forwards(
    "_decode", "_kv_layout", "_window_left", "_logits_soft_cap", "_sm_scale", "_pos_encoding_mode",
    "_rope_scale", "_rope_theta", "_jit_module", "_use_cuda_graph", "_cached_q_data_type",
    "_cached_kv_data_type",
)  # fmt: skip
class PodWrapper:
    """Base of both POD wrappers. `_decode` plans the decode side alone. It owns the float
    workspace, the buffers of CUDA graphs and the plan of every run()."""

    _decode: BatchPrefillWithPagedKVCacheWrapper
    _pod_plans: PodPlanCache

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds device memory and cannot be pickled or copied; "
            "construct another wrapper and plan it"
        )

    end_forward = BatchPrefillWithPagedKVCacheWrapper.end_forward

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces the float workspace, and the int workspace of the decode side alone, as in
        BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer(). Work lists of both sides lie
        in memory of the wrapper's own."""
        if self.is_cuda_graph_enabled and any(True for _ in self._pod_plans.joined()):
            raise ValueError(
                "reset_workspace_buffer(): a CUDA graph has captured a run(), which holds on to "
                "the workspaces; construct another wrapper"
            )
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._pod_plans.forget()

    @property
    def device(self) -> torch.device:
        """Device of the workspace and of every tensor of run()."""
        return self._decode.device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if the wrapper was constructed with use_cuda_graph=True."""
        return self._decode.is_cuda_graph_enabled

    @property
    def variant(self) -> str | None:
        """The id of the kernel of the last run(), or of both where they were two launches; before a
        run() that of the decode side alone, before plan() None."""
        last = self._pod_plans.last
        return self._decode.variant if last is None else last.launch.id

    @property
    def launches(self) -> int | None:
        """Launches of the last run(): 1, or 2 where no kernel takes both sides or two launches are
        faster; None before."""
        last = self._pod_plans.last
        return None if last is None else last.launches

    @property
    def _backend(self) -> str:
        """The backend that the caller named, or the planned one after "auto"."""
        return self._decode._requested_backend.by_caller or self._planned_backend

    @property
    def _planned_backend(self) -> str:
        last = self._pod_plans.last
        return self._decode._planned_backend if last is None else last.launch.backend.name

    _indptr_type = torch.int32

    def __repr__(self) -> str:
        name, decode = type(self).__name__, self._decode
        where = f"kv_layout={decode._kv_layout!r}, device='{self.device}'"
        if decode._plan.request is None:
            return f"{name}(backend={decode._requested_backend!r}, {where}, not planned)"
        last = self._pod_plans.last
        launches = "no run yet" if last is None else f"launches={last.launches}"
        return (
            f"{name}(backend={self._planned_backend!r}{decode._requested_backend.override}, "
            f"variant={self.variant!r}, {launches}, {where})"
        )

    def _memory(
        self, dense: torch.Tensor | None, packed: torch.Tensor | None, pod_plan: PodPlan
    ) -> _core.RunMemory:
        """Run memory of the prefill side, with the mask of one run, checked and packed."""
        device_stream = self._decode._plan.workspace.device_stream
        batch, given_packed = pod_plan.prefill.batch, packed is not None
        with error_context(SIDES[0]):
            mask = masks.check_mask(dense, packed, batch)
            masks.check_mask_device(mask, self.device)
            mask = masks.mask_of_run(mask, given_packed, batch, device_stream, side="_p")
        launch = pod_plan.launch  # of both sides, or of the prefill side first
        variant = launch.prefill if isinstance(launch, TwoLaunches) else launch
        return memory_with_mask(variant, mask)

    def _check_call(self, use_fp16_qk_reduction: Any, enable_pdl: Any) -> None:
        if torch_modes.traced():
            raise NotImplementedError(
                f"{type(self).__name__}.run() cannot be recorded by torch.compile, torch.export or "
                "make_fx; call it outside, or use the prefill and the decode wrapper, which can"
            )
        if use_fp16_qk_reduction is not False or enable_pdl is not None:
            validate.permission("use_fp16_qk_reduction", use_fp16_qk_reduction)
            validate.permission("enable_pdl", enable_pdl)
