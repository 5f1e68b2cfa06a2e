"""What a batch wrapper holds: what was asked, drafted and planned, and all of it that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from .. import _core
from .._check import values as check
from .._check.request import Request
from .._check.scales import Scales
from .._device.workspace import Workspace
from .._plan.pipeline import Draft
from .._run.place import Place
from .._run.variant import PlannedVariant

_VARIANTS_KEPT = 8


class Asked(NamedTuple):
    """One call of plan(), checked."""

    request: Request
    scales: Scales
    causal: bool  # as given: the options have none beside a custom mask
    logits_soft_cap: float  # as given: the options have it in float32


class Planned(NamedTuple):
    """What plan() leaves behind."""

    asked: Asked
    scales: Scales  # those asked for
    # The variant that run() means where it names no options; None where begin_forward() planned
    # another and no run() has wanted this one yet.
    usual: PlannedVariant | None
    # The variant that plan() or begin_forward() made, for these options.
    primary: PlannedVariant
    options: _core.AttentionOptions
    # What run(window_left=...) and forward() asked for.
    others: dict[_core.AttentionOptions, PlannedVariant]

    def variants(self) -> set[PlannedVariant]:
        """Each once: `usual` is `primary`, or one of the others unless it was pushed out."""
        return {self.primary, self.usual or self.primary, *self.others.values()}

    def keep(self, options: _core.AttentionOptions, variant: PlannedVariant) -> None:
        """One more of the others. Makes room for it; those that a CUDA graph replays stay."""
        if len(self.others) >= _VARIANTS_KEPT:
            for surplus in [o for o, other in self.others.items() if not other.shared]:
                del self.others[surplus]
        self.others[options] = variant


class ForwardOptions(NamedTuple):
    """The options of forward() that choose a variant."""

    causal: bool
    window_left: int
    encoding: check.PositionEncoding
    soft_cap: float

    def applied_to(self, options: _core.AttentionOptions) -> _core.AttentionOptions:
        return options.replace(
            causal=self.causal and options.mask != _core.Mask.custom,
            window_left=self.window_left,
            position=self.encoding.position,
            rope_scale=self.encoding.rope_scale,
            rope_theta=self.encoding.rope_theta,
            soft_cap=self.soft_cap,
        )


class State(NamedTuple):
    """All of a wrapper that changes. Replaced as a whole, so that a refused or interrupted call
    changes nothing."""

    workspace: Workspace
    planned: Planned | None = None
    shared: tuple[PlannedVariant, ...] = ()  # of earlier plans: CUDA graphs replay their work lists
    # With use_cuda_graph=True: the most query rows of any plan, as the first one has them, and
    # where the runs are that graphs have captured.
    graph_rows: int = 0
    captured: Mapping[_core.AttentionOptions, Place] = MappingProxyType({})
    # What the last forward() asked for, until a run() shows that the caller does not forward().
    last_forward: ForwardOptions | None = None

    def of_copy(self) -> State:
        """What a copied wrapper begins with: the same plan, and work lists of its own from then
        on."""
        workspace, planned = self.workspace, self.planned
        own = Workspace(workspace.device_stream.device, workspace.float_buffer.tensor)
        if planned is not None:
            for variant in planned.variants():
                variant.shared = True
            planned = planned._replace(others=dict(planned.others))
        return State(own, planned, last_forward=self.last_forward)

    def shared_so_far(self) -> tuple[PlannedVariant, ...]:
        planned = self.planned
        if planned is None or not (planned.primary.shared or planned.others):
            return self.shared
        # A copied wrapper keeps what it shares by itself.
        replayed = (v for v in planned.variants() if v.place.captured is not None)
        return (*self.shared, *replayed)

    def captured_so_far(self) -> Mapping[_core.AttentionOptions, Place]:
        variants = () if self.planned is None else self.planned.variants()
        new = {v.expected.options: v.place for v in variants if v.place.captured is not None}
        return {**self.captured, **new} if new else self.captured


class Drafted(NamedTuple):
    """A plan that only has to be placed and uploaded."""

    workspace: Workspace
    draft: Draft
    asked: Asked
    options: _core.AttentionOptions  # those drafted for; begin_forward() may differ from asked
    # With use_cuda_graph=True: what else has to be planned again for graphs that captured it, and
    # what fills the buffers.
    refreshed: Mapping[_core.AttentionOptions, Draft] = MappingProxyType({})
    copy_in: Callable[[], None] | None = None
