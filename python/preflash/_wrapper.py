"""What the paged and the ragged wrapper share: plan once, run for many layers, select again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import _backends, _core, _lengths, _masks, _tensors
from . import _validate as check
from ._lengths import PageList
from ._options import Options, batch_options, softmax_scale
from ._planned import DEFAULT_OUTPUTS, Outputs, PlannedVariant, Scales
from ._signatures import PlanArguments
from ._workspace import Upload, Workspace, check_buffer, draft, upload

_VARIANTS_KEPT = 8


class _Request(NamedTuple):
    """One call of plan(), checked as far as Python can see."""

    batch: _core.Batch
    options: Options
    causal: bool
    scales: Scales
    pages: PageList | None  # None: ragged
    mask: torch.Tensor | None  # owned and packed
    blocking: bool


class _Planned(NamedTuple):
    """What plan() leaves behind."""

    request: _Request
    scales: Scales  # the request's
    expected: _tensors.Expected
    primary: PlannedVariant
    others: dict[Options, PlannedVariant]  # what run(window_left=...) and forward() asked for


class _State(NamedTuple):
    """All of a wrapper that changes. Replaced as a whole, so that a refused or interrupted call
    changes nothing."""

    workspace: Workspace
    planned: _Planned | None = None
    shared: tuple[PlannedVariant, ...] = ()  # of earlier plans: CUDA graphs replay their work lists

    def shared_so_far(self) -> tuple[PlannedVariant, ...]:
        planned = self.planned
        if planned is None or not (planned.primary.shared or planned.others):
            return self.shared
        variants = (planned.primary, *planned.others.values())
        return (*self.shared, *(variant for variant in variants if variant.shared))


class BatchPrefillWrapper:
    """Base of the public wrappers. Subclasses turn arguments into a batch and a (k, v) pair."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        graph_buffers: dict[str, Any],
    ) -> None:
        buffer = check_buffer("float_workspace_buffer", float_workspace_buffer)
        self._kv_layout = check.one_of("kv_layout", kv_layout, check.KV_LAYOUTS)
        self._requested_backend = _backends.check_name(backend)
        if check.flag("use_cuda_graph", use_cuda_graph):
            raise NotImplementedError(
                "use_cuda_graph=True is not served by this build; leave it False"
            )
        for name, value in graph_buffers.items():
            # Documented as effective with use_cuda_graph only.
            if value is not None:
                check.tensor(name, value)
        self._state = _State(Workspace(buffer.device, buffer))

    def __copy__(self) -> BatchPrefillWrapper:
        """Another wrapper with the same plan and float workspace; each plans for itself."""
        workspace = self._state.workspace
        if workspace.int_room is not None:
            raise TypeError(
                f"{type(self).__name__} plans into the int_workspace_buffer of "
                "reset_workspace_buffer(), which a copy would overwrite; construct another wrapper"
            )
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        own = Workspace(workspace.device_stream.device, workspace.float_buffer.tensor)
        planned = self._state.planned
        if planned is not None:
            for variant in (planned.primary, *planned.others.values()):
                variant.shared = True
            planned = planned._replace(others=dict(planned.others))
        other._state = _State(own, planned)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds device memory and cannot be pickled or deep-copied; "
            "construct another wrapper and plan it"
        )

    # What a subclass adds.

    def _batch(self, a: PlanArguments) -> tuple[_core.Batch, PageList | None]:
        """The batch in the arguments of plan(), and its pages."""
        raise NotImplementedError

    def _check_hints(self, a: PlanArguments, request: _Request) -> None:
        _lengths.check_hints(a, request.batch, self.device)

    # Planning.

    def _request(self, a: PlanArguments) -> _Request:
        """Checks everything but the values of indptr, which the planner does."""
        options = batch_options(a)
        batch, pages = self._batch(a)
        if options.custom_mask:
            batch.use_mask()
        return _Request(
            batch=batch,
            options=options,
            causal=a.causal,
            scales=Scales(softmax_scale(a.sm_scale, options), 1.0),
            pages=pages,
            mask=None,
            blocking=not a.non_blocking,
        )

    @check.eager
    def _plan(self, a: PlanArguments) -> None:
        workspace = self._state.workspace
        request = self._request(a)
        drafted = draft(workspace, self._requested_backend, request.batch, request.options)
        self._check_hints(a, request)
        mask = _masks.check_mask(
            a.custom_mask, a.packed_custom_mask, request.batch, (request.batch.mask_elements,)
        )
        if mask is not None:
            _masks.check_mask_device(mask, self.device)
            packed = a.packed_custom_mask is not None
            mask = _masks.owned_mask(mask, packed, request.batch, workspace.device_stream)
            request = request._replace(mask=mask)
        self._install(workspace, drafted, request)

    def _install(self, workspace: Workspace, drafted: tuple, request: _Request) -> None:
        """Uploads a plan that has passed every check and makes it the wrapper's."""
        batch, pages = request.batch, request.pages
        expected = _tensors.Expected(
            options=request.options,
            device=workspace.device_stream.device,
            kv_layout=self._kv_layout,
            qo_tokens=batch.qo_end,
            kv_tokens=batch.kv_end,
            page_size=batch.page_size,
            largest_page=None if pages is None else pages.largest,
        )
        before = self._state
        shared = before.shared_so_far()

        def commit(primary: PlannedVariant) -> tuple[object, object]:
            return self, _State(
                workspace, _Planned(request, request.scales, expected, primary, {}), shared
            )

        upload(workspace, drafted, _upload_of(request, expected), commit)
        if before.planned is not None:
            before.workspace.give_back(before.planned.primary)

    def _planned(self) -> _Planned:
        planned = self._state.planned
        if planned is None:
            raise ValueError("run() before plan(): call plan() with the lengths of the batch first")
        return planned

    def _select(self, **changes: Any) -> PlannedVariant:
        """The variant for the planned batch with other options; planned when first asked for."""
        planned = self._planned()
        request = planned.request
        options = request.options._replace(**changes)
        if options.custom_mask:
            options = options._replace(causal=False)
        if options == request.options:
            return planned.primary
        found = planned.others.get(options)
        if found is None:
            workspace = self._state.workspace.beside()
            drafted = draft(workspace, self._requested_backend, request.batch, options)
            expected = planned.expected._replace(options=options)
            found = upload(workspace, drafted, _upload_of(request, expected))
            _forget_surplus(planned.others)
            planned.others[options] = found
        return found

    def _workspace_size(self, a: PlanArguments) -> tuple[int, int]:
        request = self._request(a)
        unlimited = Workspace(self.device, None, float_bytes=1 << 40)
        _, plan = draft(unlimited, self._requested_backend, request.batch, request.options)
        return plan.float_bytes, plan.int_bytes

    # Running.

    def _run(
        self, q: torch.Tensor, kv: Any, a: tuple[Any, Any, Any], outputs: Outputs, window_left: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """a: q_scale, k_scale, v_scale."""
        planned = self._planned()
        variant = planned.primary
        if window_left is not None:
            variant = self._select(
                window_left=check.integer("window_left", window_left, at_least=-1)
            )
        scales = planned.scales
        q_scale, k_scale, v_scale = a
        if q_scale is not None or k_scale is not None or v_scale is not None:
            scales = run_scales(variant.expected.options, scales.logits, q_scale, k_scale, v_scale)
        return variant.run(q, kv, scales, outputs)

    def _forward(
        self, q: torch.Tensor, kv: Any, a: PlanArguments, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The deprecated call: its own options count, defaults included, not those of plan()."""
        check.position_encoding(a.pos_encoding_mode, a.rope_scale, a.rope_theta)
        check.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
        check.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
        variant = self._select(
            causal=check.flag("causal", a.causal),
            window_left=check.integer("window_left", a.window_left, at_least=-1),
            logits_soft_cap=check.soft_cap(a.logits_soft_cap),
        )
        options = variant.expected.options
        sm_scale = softmax_scale(a.sm_scale, options)
        scales = run_scales(options, sm_scale, None, a.k_scale, a.v_scale)
        return variant.run(q, kv, scales, Outputs(return_lse=return_lse))

    def end_forward(self) -> None:
        """Does nothing; kept for callers of older releases."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces both workspaces. What is planned is planned again into the new ones.

        Args:
            float_workspace_buffer: scratch memory for split-KV partials, on the wrapper's device.
            int_workspace_buffer: memory for the work list, on the wrapper's device. It is used as
                it is and never grows; workspace_size() tells how many bytes a plan needs.

        Raises:
            ValueError: another device, not contiguous, not 16-byte aligned, or too small for what
            is
                planned; the wrapper then keeps its buffers.
            TypeError: not tensors.
        """
        float_buffer = check_buffer("float_workspace_buffer", float_workspace_buffer, self.device)
        int_buffer = check_buffer("int_workspace_buffer", int_workspace_buffer, self.device)
        workspace = Workspace(self.device, float_buffer, int_buffer)
        planned = self._state.planned
        if planned is None:
            self._state = _State(workspace)
            return
        request = planned.request
        drafted = draft(workspace, self._requested_backend, request.batch, request.options)
        self._install(workspace, drafted, request)

    # What callers read.

    @property
    def device(self) -> torch.device:
        """Where the workspace and every tensor of run() are."""
        return self._state.workspace.device_stream.device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    @property
    def variant(self) -> str | None:
        """The id of the kernel that plan() chose; None before."""
        planned = self._state.planned
        return None if planned is None else planned.primary.plan.id

    # Serving engines read these.

    @property
    def _backend(self) -> str:
        planned = self._state.planned
        return self._requested_backend if planned is None else planned.primary.backend.name

    @property
    def _causal(self) -> bool:
        planned = self._state.planned
        return False if planned is None else planned.request.causal

    @property
    def _window_left(self) -> int:
        planned = self._state.planned
        return -1 if planned is None else planned.request.options.window_left

    @property
    def _logits_soft_cap(self) -> float:
        planned = self._state.planned
        return 0.0 if planned is None else planned.request.options.logits_soft_cap

    @property
    def _sm_scale(self) -> float | None:
        planned = self._state.planned
        return None if planned is None else planned.request.scales.logits

    def __repr__(self) -> str:
        name = type(self).__name__
        planned = self._state.planned
        if planned is None:
            return (
                f"{name}(backend={self._requested_backend!r}, kv_layout={self._kv_layout!r}, "
                f"device='{self.device}', not planned)"
            )
        return (
            f"{name}(backend={self._backend!r}, variant={self.variant!r}, "
            f"kv_layout={self._kv_layout!r}, device='{self.device}', "
            f"batch_size={planned.request.batch.num_requests})"
        )


def _upload_of(request: _Request, expected: _tensors.Expected) -> Upload:
    indices = None if request.pages is None else request.pages.on_device
    return Upload(expected, indices, request.mask, request.blocking)


def _forget_surplus(others: dict[Options, PlannedVariant]) -> None:
    """Makes room for one more variant; those that a CUDA graph replays stay."""
    if len(others) >= _VARIANTS_KEPT:
        for options in [o for o, variant in others.items() if not variant.shared]:
            del others[options]


def run_scales(
    options: Options, sm_scale: float, q_scale: Any, k_scale: Any, v_scale: Any
) -> Scales:
    """Folds the calibration scales into the two factors that kernels know."""
    if q_scale is not None:
        sm_scale *= check.scale("q_scale", q_scale)
    if k_scale is not None:
        sm_scale *= check.scale("k_scale", k_scale)
    check.logits_scale("sm_scale * q_scale * k_scale", sm_scale, options.logits_soft_cap)
    return Scales(sm_scale, 1.0 if v_scale is None else check.scale("v_scale", v_scale))


def run_outputs(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
) -> Outputs:
    """The outputs of one run. Called for every layer: the usual forms are not looked at twice."""
    usual = lse_base == "log2" and lse_layout == "NH"
    if usual and out is None and lse is None and return_lse is False:
        return DEFAULT_OUTPUTS
    outputs = Outputs(out, lse, return_lse, lse_base, lse_layout)
    if usual and (return_lse is False or return_lse is True):
        return outputs
    return outputs.checked()
