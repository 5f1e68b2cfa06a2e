"""Prefill beside decode: both sides of a run in one launch, or in two where no kernel takes both or
two are faster.

A plan() knows the decode side, and for a wrapper of batches the lengths of both. What a run()
brings beside, the lengths of a prefill, its mask and its options, is planned together with that
when it is first seen, and kept: further layers only launch.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch

from .. import _core
from .._check import values as check
from .._check.arguments import Result
from .._check.request import Request
from .._check.tensors import kv_of, refuse_shared
from .._device import backends
from .._device.stream import DeviceStream
from .._device.workspace import Workspace
from .._plan import masks, pipeline
from .._run.segments import (
    PlannedSegments,
    SegmentRun,
    key_of_run,
    of_side,
    plan_segments,
    refuse_gradients_of,
)
from .._run.variant import PlannedVariant

SIDES = ("prefill side", "decode side")
_JOINTS_KEPT = 64


class InSequence:
    """A launch for each side, one after the other: what no kernel runs as one, or not as fast."""

    launches = 2

    def __init__(self, prefill: PlannedVariant, decode: PlannedVariant) -> None:
        self._variants = (prefill, decode)
        self._checked: set[tuple] = set()

    @property
    def id(self) -> str:
        return ", ".join(variant.plan.id for variant in self._variants)

    @property
    def backend(self) -> backends.Backend:
        """That of the decode side; the other one's is another only with "auto"."""
        return self._variants[1].backend

    @property
    def shared(self) -> bool:
        """Whether a CUDA graph may still run the prefill, of which there is no other owner. The
        decode side is the wrapper's, and captured beside other prefills, too."""
        return self._variants[0].shared

    def attend_to(self, runs: list[SegmentRun]) -> tuple[Result, ...]:
        self._check(runs)
        results = []
        for run, variant, side in zip(runs, self._variants, SIDES, strict=True):
            memory = None if run.mask is None else variant.memory_with_mask(run.mask)
            with of_side(side):
                results.append(variant.attend_to(run.q, run.kv, run.scales, run.outputs, memory))
        return tuple(results)

    def _check(self, runs: list[SegmentRun]) -> None:
        """Refuses what is wrong on either side before one of them is launched, and what one launch
        of both would refuse."""
        try:
            key = tuple(map(key_of_run, runs))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            key = None  # no ordinary tensors: the checks say which argument it is
        if key is None or key not in self._checked:
            for run, variant, side in zip(runs, self._variants, SIDES, strict=True):
                with of_side(side):
                    variant.check_run(run.q, run.kv, run.outputs)
            if key is not None:
                if len(self._checked) >= _JOINTS_KEPT:
                    self._checked.clear()
                self._checked.add(key)
        refuse_gradients_of(runs, SIDES)
        if any(run.outputs.out is not None or run.outputs.lse is not None for run in runs):
            self._check_apart(runs)

    def _check_apart(self, runs: list[SegmentRun]) -> None:
        """Outputs that were given need memory of their own, on both sides together."""
        written, read = [], []
        for run, variant, side in zip(runs, self._variants, SIDES, strict=True):
            rows = variant.expected.qo_tokens  # those behind are padding
            for name, value in _given_outputs(run, rows).items():
                written.append((side, name, value))
            k, v = kv_of(run.kv)
            for name, value in (("q", run.q[:rows]), ("k", k), ("v", v)):
                read.append((side, name, value))
        scratch = self._variants[1].float_workspace  # of both
        for i, (side, name, value) in enumerate(written):
            if scratch is not None:
                refuse_shared(f"{side}'s {name}", value, "float_workspace_buffer", scratch)
            for other_side, other_name, other in (*read, *written[i + 1 :]):
                # q itself may be written to: the kernel that reads it knows whether.
                if side != other_side or (name, other_name) != ("out", "q"):
                    mine, others = f"{side}'s {name}", f"{other_side}'s {other_name}"
                    refuse_shared(mine, value, others, other)


def _given_outputs(run: SegmentRun, rows: int) -> dict[str, torch.Tensor]:
    out, lse = run.outputs.out, run.outputs.lse
    found = {} if out is None else {"out": out[:rows]}
    if lse is not None:
        found["lse"] = lse[:rows] if run.outputs.lse_layout == "NH" else lse[:, :rows]
    return found


class Joint(NamedTuple):
    """What one kind of prefill and the planned decode batch run as."""

    of: object  # what plan() left when it was made; None: a plan with other options came since
    prefill: Request
    decode_options: _core.AttentionOptions
    launch: PlannedSegments | InSequence


class Asked(NamedTuple):
    """What is planned together: for the wrapper's plan `of`, in its workspace."""

    of: object
    prefill: Request
    decode: PlannedVariant
    decode_request: Request
    workspace: Workspace


class Joints:
    """Of one wrapper."""

    def __init__(self, requested: backends.Requested) -> None:
        self._requested = requested
        self._kept: OrderedDict[Hashable, Joint] = OrderedDict()
        # What CUDA graphs may replay, by key and options of the decode side: kept for good.
        self._captured: dict[tuple[Hashable, _core.AttentionOptions], Joint] = {}
        self._replaced: list[Joint] = []  # as well, under keys that have another one now
        self.last: Joint | None = None

    def find(self, key: Hashable, of: object) -> Joint | None:
        """What was made for the plan `of`."""
        found = self._kept.get(key)
        return found if found is not None and found.of is of else None

    def make(self, key: Hashable, asked: Asked) -> Joint:
        """Plans both sides. Raises everything that a plan() raises once its arguments are
        checked."""
        check.not_traced()
        refuse_capture(asked.workspace.device_stream)
        options = asked.decode_request.options
        joint = Joint(asked.of, asked.prefill, options, self._launch(asked))
        self._kept[key] = joint
        self._kept.move_to_end(key)
        if len(self._kept) > _JOINTS_KEPT:
            self._kept.popitem(last=False)
        return joint

    def run(self, key: Hashable, joint: Joint, runs: list[SegmentRun]) -> tuple[Result, ...]:
        was_shared = joint.launch.shared
        results = joint.launch.attend_to(runs)
        if joint.launch.shared and not was_shared:
            captured = (key, joint.decode_options)
            before = self._captured.get(captured)
            if before is not None:
                self._replaced.append(before)
            self._captured[captured] = joint
        self.last = joint
        return results

    def forget(self, workspace: Workspace) -> None:
        """A plan() makes the work lists of the one before useless, but for those of graphs."""
        kept, self._kept = self._kept, OrderedDict()
        self.last = None
        for joint in kept.values():
            if isinstance(joint.launch, PlannedSegments) and not joint.launch.shared:
                workspace.give_back(joint.launch.place.buffer, joint.launch)

    # use_cuda_graph=True: plan() changes what a captured run() replays, but for its options.

    def joined(self) -> Iterator[tuple[Hashable, Joint]]:
        """Those of graphs that read the decode side's lengths."""
        for (key, _), joint in self._captured.items():
            if isinstance(joint.launch, PlannedSegments):
                yield key, joint

    def drafts(self, decode: Request) -> list[tuple[Hashable, Joint, _core.Plan]]:
        """The plans of everything captured, for another decode batch. Changes nothing."""
        return [
            (key, joint, joint.launch.draft(_both_sides(joint, decode)))
            for key, joint in self.joined()
        ]

    def order_behind_runs(self) -> None:
        for _, joint in self.joined():
            joint.launch.order_behind_runs()

    def write(
        self, drafts: list[tuple[Hashable, Joint, _core.Plan]], of: object, decode: Request
    ) -> None:
        for key, joint, plan in drafts:
            joint.launch.write(plan, _both_sides(joint, decode))
            as_planned = joint.decode_options == decode.options
            joint = joint._replace(of=of if as_planned else None)
            self._captured[key, joint.decode_options] = joint
            if as_planned:
                self._kept[key] = joint

    def _launch(self, asked: Asked) -> PlannedSegments | InSequence:
        """NOTE: the one place that decides whether both sides are one launch."""
        device = asked.workspace.device_stream.device
        prefill, decode = asked.prefill, asked.decode_request
        workspace = asked.workspace.beside()
        name = self._requested.name
        apart = _forced_apart or _has_no_query(prefill) or _has_no_query(decode)
        backend = backends.choose(name, device, prefill.options, decode.options)
        sides = [(side.options, side.lengths.batch) for side in (prefill, decode)]
        if (
            not apart
            and backend.separates(device, prefill.options, decode.options) is None
            and not backend.faster_apart(*sides)
        ):
            return plan_segments(workspace, backend, [prefill, decode], SIDES)
        with of_side(SIDES[0]):
            alone = prefill._replace(graph_rows=0)
            draft = pipeline.plan(workspace, name, alone)
            variant = pipeline.place(workspace, draft, alone)
            pipeline.upload(workspace, (variant,), alone)
        return InSequence(variant, asked.decode)


def _both_sides(joint: Joint, decode: Request) -> list[Request]:
    """As a graph has captured them, with the lengths of another decode batch."""
    return [joint.prefill, decode._replace(options=joint.decode_options)]


_forced_apart = False


@contextlib.contextmanager
def forced_apart() -> Iterator[None]:
    """Two launches inside whatever the sides are, for tests."""
    global _forced_apart
    before, _forced_apart = _forced_apart, True
    try:
        yield
    finally:
        _forced_apart = before


def _has_no_query(request: Request) -> bool:
    return request.lengths.batch.max_qo_len == 0


def refuse_capture(device_stream: DeviceStream) -> None:
    if device_stream.is_capturing():
        raise RuntimeError(
            "this run() needs a plan, which cannot be made while its stream is being captured into "
            "a CUDA graph: call it once before the capture, with a prefill of the same shapes and "
            "options"
        )


def mask_of_run(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    request: Request,
    device_stream: DeviceStream,
) -> torch.Tensor:
    """The prefill side's mask of one run, checked and packed."""
    batch = request.lengths.batch
    mask = masks.check_mask(custom_mask, packed_custom_mask, batch)
    masks.check_mask_device(mask, device_stream.device)
    packed = packed_custom_mask is not None
    if device_stream.is_capturing() and not (packed and mask.is_cuda):
        raise RuntimeError(
            "a dense mask, or one on the CPU, cannot be packed while the stream is being captured "
            "into a CUDA graph: pass packed_custom_mask_p (packbits) on the GPU"
        )
    return masks.owned_mask(mask, packed, batch, device_stream)
