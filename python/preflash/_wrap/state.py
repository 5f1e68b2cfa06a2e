"""State of a batch wrapper: checked calls of plan(), drafts, plans, and all else that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import _core
from .._check.options import BatchOptions
from .._check.request import Request
from .._check.scales import Scales
from .._device.workspace import Workspace
from .._plan.masks import NO_ITEMS, Items
from .._plan.pipeline import Draft, HostCopy
from .._run.variant import PlannedVariant

_VARIANTS_KEPT = 8


class Asked(NamedTuple):
    """One call of plan(), checked."""

    request: Request
    scales: Scales
    given: BatchOptions
    items: Items = NO_ITEMS


class Planned(NamedTuple):
    """The result of plan()."""

    asked: Asked
    scales: Scales  # asked.scales
    # The variant of a run() without options; None if begin_forward() planned another one and no
    # run() has used this one yet.
    usual: PlannedVariant | None
    # The variant that plan() or begin_forward() made.
    primary: PlannedVariant
    # Variants for runs with a window_left or skipped tiles, and for forward().
    others: dict[_core.AttentionOptions, PlannedVariant]

    def variants(self) -> set[PlannedVariant]:
        """All variants, each once: `usual` is `primary` or, unless dropped, one of the others."""
        # NOTE: other threads may add to the others; list() copies them at once.
        return {self.primary, self.usual or self.primary, *list(self.others.values())}

    def keep(self, options: _core.AttentionOptions, variant: PlannedVariant) -> None:
        """Adds one to the others. Makes room for it; shared ones stay (CUDA graphs, copies)."""
        if len(self.others) >= _VARIANTS_KEPT:
            for surplus, other in list(self.others.items()):
                if not other.shared:
                    self.others.pop(surplus, None)
        self.others[options] = variant


class State(NamedTuple):
    """All of a wrapper that changes. Replaced as a whole, so that a refused or interrupted call
    changes nothing."""

    workspace: Workspace
    planned: Planned | None = None
    shared: tuple[PlannedVariant, ...] = ()  # earlier plans, whose work lists CUDA graphs replay
    # With use_cuda_graph=True: the maximum query rows of any plan, set by the first one, and the
    # places of captured work lists.
    graph_rows: int = 0
    captured: Mapping[_core.AttentionOptions, _core.Place] = MappingProxyType({})
    # The options of the last forward(), until a run() shows that the caller does not forward().
    last_forward: Mapping[str, Any] | None = None

    def of_copy(self) -> State:
        """Initial state of a copied wrapper: the same plan, and memory of its own for later work
        lists."""
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
        replayed = (v for v in planned.variants() if _is_captured(v))
        return (*self.shared, *replayed)

    def captured_so_far(self) -> Mapping[_core.AttentionOptions, _core.Place]:
        variants = () if self.planned is None else self.planned.variants()
        new = {v.request.options: v.place for v in variants if _is_captured(v)}
        return {**self.captured, **new} if new else self.captured


def _is_captured(variant: PlannedVariant) -> bool:
    return variant.place.captured is not None


class Drafted(NamedTuple):
    """A plan that only has to be placed and uploaded."""

    workspace: Workspace
    draft: Draft
    asked: Asked
    options: _core.AttentionOptions  # of the draft; with begin_forward() they may differ from asked
    # With use_cuda_graph=True: drafts of the other variants that graphs captured, and the call
    # that fills the buffers.
    refreshed: Mapping[_core.AttentionOptions, Draft] = MappingProxyType({})
    copy_in: Callable[[], list[HostCopy]] | None = None
