"""The plan of a batch wrapper, which holds everything of the wrapper that changes.

Its variants each hold a _core.Plan, which is something else: the kernel and work list of a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _core
from .._check.request import Request
from .._run.variant import new_workspace

_VARIANTS_KEPT = 8

# Variants of one batch, by the options that they serve.
Variants = dict[_core.AttentionOptions, _core.ExecutionPlan]
# The places of work lists that CUDA graphs have captured, each with the options of its variant.
CapturedBuffers = tuple[tuple[_core.AttentionOptions, _core.PlanBuffer], ...]


class Plan(NamedTuple):
    """The request of the last plan() and the variants that serve it. Replaced as a whole, so that a
    refused or interrupted call changes nothing."""

    workspace: _core.Workspace
    request: Request | None = None  # None: not planned, and no variants
    # The variant of a run() without options; None until the first such run() if begin_forward()
    # planned for the options of forward() instead.
    default_variant: _core.ExecutionPlan | None = None
    # The variant that plan() or begin_forward() made.
    primary: _core.ExecutionPlan | None = None
    # Variants for runs with a window_left or skipped tiles, for forward(), and of CUDA graphs.
    others: Variants = {}  # noqa: RUF012, replaced by every plan()
    windows: dict[int, _core.ExecutionPlan] = {}  # noqa: RUF012, those of the others for a window alone
    shared: tuple[
        _core.ExecutionPlan, ...
    ] = ()  # earlier ones, whose work lists CUDA graphs replay
    # With use_cuda_graph=True: the maximum query rows of any plan, set by the first one, and the
    # places of captured work lists.
    graph_rows: int = 0
    captured: CapturedBuffers = ()
    # The options of the last forward(), until a run() shows that the caller does not forward().
    last_forward: Mapping[str, Any] | None = None

    def variants(self) -> set[_core.ExecutionPlan]:
        """All variants, each once: the default one is `primary` or, unless dropped, one of the
        others."""
        if self.primary is None:
            return set()
        # NOTE: other threads may add to the others; list() copies them at once.
        return {self.primary, self.default_variant or self.primary, *list(self.others.values())}

    def keep(self, options: _core.AttentionOptions, variant: _core.ExecutionPlan) -> None:
        """Adds a variant to the others. Full, they first lose all but those that CUDA graphs or
        copied wrappers share."""
        if len(self.others) >= _VARIANTS_KEPT:
            self.windows.clear()  # which may hold them
            for surplus, other in list(self.others.items()):
                if not other.shared:
                    self.others.pop(surplus, None)
        self.others[options] = variant

    def keep_window(self, window_left: int, variant: _core.ExecutionPlan) -> None:
        """Remembers the variant of a run() with this window and no other option."""
        if len(self.windows) >= _VARIANTS_KEPT:
            self.windows.clear()
        self.windows[window_left] = variant

    def dropped(self, captured: CapturedBuffers) -> Plan:
        """This plan without its variants, for the next plan() to overwrite their memory."""
        return Plan(
            self.workspace, None, None, None, {}, {}, self.shared, self.graph_rows, captured,
            self.last_forward,
        )  # fmt: skip

    def of_copy(self) -> Plan:
        """Plan of a copied wrapper: the same variants, and memory of its own for later work
        lists."""
        workspace = self.workspace
        own = new_workspace(workspace.device_stream.device, workspace.float_tensor)
        for variant in self.variants():
            variant.shared = True
        return self._replace(workspace=own, others=dict(self.others), windows={}, shared=())

    def shared_so_far(self) -> tuple[_core.ExecutionPlan, ...]:
        """Variants of this and earlier plans that CUDA graphs replay."""
        if self.primary is None or not (self.primary.shared or self.others):
            return self.shared
        # A copied wrapper keeps what it shares by itself.
        replayed = (variant for variant in self.variants() if variant.plan_buffer.is_captured)
        return (*self.shared, *replayed)

    def captured_so_far(self) -> CapturedBuffers:
        """Buffers that CUDA graphs have captured, under this plan and earlier ones."""
        known = [buffer for _, buffer in self.captured]
        new = [
            v for v in self.variants() if v.plan_buffer not in known and v.plan_buffer.is_captured
        ]
        if not new:
            return self.captured
        return (
            *self.captured,
            *((variant.request.options, variant.plan_buffer) for variant in new),
        )
