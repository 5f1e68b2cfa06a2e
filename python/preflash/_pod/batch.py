"""A batch of prefills beside a batch of decode requests; preflash.pod exports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import values as check
from .._check.arguments import GivenScales, KvCache, Result, Scale, converted
from .._check.calls import BatchPodPlanArguments, PagedPlanArguments
from .._check.lengths import Lengths
from .._check.names import tells_nearest
from .._check.outputs import run_outputs
from .._check.scales import folded_scales
from .._compat.engine_attributes import forwards, only, planned_array, planned_pages, told
from .._compat.signatures import takes
from .._device import backends
from .._run.variant import SegmentRun, of_side
from .._wrap.decode import data_types
from .._wrap.paged import BatchPrefillWithPagedKVCacheWrapper
from .._wrap.state import Asked, Planned
from .joint import SIDES, Joint, Joints
from .wrapper import PodWrapper


def _prefill_array(tell: Callable[[Lengths, torch.device], torch.Tensor]) -> told:
    """What plan() got for the prefills; None before."""

    def find(wrapper: Any) -> torch.Tensor | None:
        if wrapper._decode._state.planned is None:
            return None
        return tell(wrapper._planned().prefill.request.lengths, wrapper.device)

    return told(find)


class _BothPlanned(NamedTuple):
    """What plan() of a wrapper of batches leaves behind."""

    prefill: Asked  # without causal and mask: those are of run()
    decode: Planned


@forwards(
    "_decode",
    _plan_info_d="_plan_info",
    _float_workspace_buffer_p="_float_workspace_buffer",
    _float_workspace_buffer_d="_float_workspace_buffer",
    _int_workspace_buffer_d="_int_workspace_buffer",
    _qo_indptr_buf_d="_qo_indptr_buf",
    _kv_indptr_buf_d="_paged_kv_indptr_buf",
    _kv_indices_buf_d="_paged_kv_indices_buf",
    _kv_last_page_len_buf_d="_paged_kv_last_page_len_buf",
)
class BatchPODWithPagedKVCacheWrapper(PodWrapper):
    """A batch of prefills beside a batch of decode requests, both over paged KV caches.

    plan() takes the lengths and options of both sides; `causal_p` and the masks of run() are the
    prefills' and are planned when first seen. PODWithPagedKVCacheWrapper says when both sides are
    one launch. The decode side may have any number of queries.

    Args:
        float_workspace_buffer, kv_layout, backend: as in PODWithPagedKVCacheWrapper; kv_layout is
            that of both caches.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: backend="cudnn".
    """

    @tells_nearest
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        backends.requested(backend)  # cuDNN serves each side, not both
        both = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)
            for _ in SIDES
        ]
        self._prefill, self._decode = both
        self._joints = Joints(self._decode)
        # Of the plan that the decode side has, or gets next.
        self._prefill_asked: Asked | None = None
        self._both: _BothPlanned | None = None

    # Attributes that callers read, of the prefills and of the decode requests.
    _use_cuda_graph = only(False, "CUDA graphs need a fixed batch: use PODWithPagedKVCacheWrapper")
    _pin_memory_int_workspace_buffer_p = None
    _pin_memory_int_workspace_buffer_d = None
    _qo_indptr_buf_p = _prefill_array(lambda of, on: planned_array(of.batch.qo_indptr, on))
    _kv_indptr_buf_p = _prefill_array(lambda of, on: planned_array(of.batch.kv_indptr, on))
    _kv_indices_buf_p = _prefill_array(planned_pages)
    _kv_last_page_len_buf_p = _prefill_array(
        lambda of, on: planned_array(of.batch.last_page_len, on)
    )

    @takes(BatchPodPlanArguments)
    def plan(self, a: BatchPodPlanArguments) -> None:
        """Plans both sides.

        Args:
            qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p: of the prefills, as in
                BatchPrefillWithPagedKVCacheWrapper.plan().
            qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d: of the decode requests.
            data_type: deprecated, as in BatchDecodeWithPagedKVCacheWrapper.plan().
            The others are those of BatchPrefillWithPagedKVCacheWrapper.plan(), for both sides.

        Raises:
            TypeError, ValueError: an argument is wrong, or a workspace too small.
            NotImplementedError: no compiled kernel serves it, or it is recorded by torch.compile.
            The wrapper keeps the plan it had.
        """
        q_data_type, kv_data_type = data_types(a.q_data_type, a.kv_data_type, a.data_type)
        prefill, decode = (
            converted(
                a,
                PagedPlanArguments,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                qo_indptr=getattr(a, f"qo_indptr_{side}"),
                paged_kv_indptr=getattr(a, f"kv_indptr_{side}"),
                paged_kv_indices=getattr(a, f"kv_indices_{side}"),
                paged_kv_last_page_len=getattr(a, f"last_page_len_{side}"),
            )
            for side in "pd"
        )
        self._plan(prefill, decode)

    begin_forward = plan

    @check.eager
    def _plan(self, prefill: PagedPlanArguments, decode: PagedPlanArguments) -> None:
        with of_side(SIDES[0]):
            drafted_p = self._prefill._drafted(prefill)
        with of_side(SIDES[1]):
            drafted_d = self._decode._drafted(decode)
        self._settle()
        self._prefill_asked = drafted_p.asked
        self._decode._install(drafted_d)
        self._joints.forget()

    def _settle(self) -> None:
        """The prefill side of what is planned goes with the next decode side, too, unless a plan()
        replaces it."""
        if self._decode._state.planned is not None:
            self._prefill_asked = self._planned().prefill

    def _planned(self) -> _BothPlanned:
        """What the last plan() left. The decode side's plan changes in one step, so run() finds
        both sides of one plan() after any interrupt."""
        decode = self._decode._planned()
        if self._both is None or self._both.decode is not decode:
            self._both = _BothPlanned(self._prefill_asked, decode)
        return self._both

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: KvCache,
        q_d: torch.Tensor,
        paged_kv_cache_d: KvCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *,
        out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> tuple[Result, Result]:
        """Computes one layer of both planned batches on the current stream.

        Args:
            q_p: [at least qo_indptr_p[-1], num_qo_heads, head_dim].
            q_d: [at least qo_indptr_d[-1], num_qo_heads, head_dim].
            paged_kv_cache_p, paged_kv_cache_d: as in BatchPrefillWithPagedKVCacheWrapper.run().
            custom_mask_p, packed_custom_mask_p, causal_p: of the prefills, as in
                BatchPrefillWithPagedKVCacheWrapper.plan().
            q_scale, k_scale, v_scale: of the decode side; floats or one-element tensors.
            return_lse: also return the log-sum-exp of both sides.
            use_fp16_qk_reduction, enable_pdl: permissions.
            out_p, lse_p, out_d, lse_d, lse_base, lse_layout: as in single_prefill_with_kv_cache.

        Returns:
            (out_p, out_d), or ((out_p, lse_p), (out_d, lse_d)) with return_lse.

        Raises:
            TypeError, ValueError: not planned, or a tensor is not what was planned. Nothing is
            launched.
            NotImplementedError: no compiled kernel serves it, or it is recorded by torch.compile.
        """
        self._check_not_recorded()
        if use_fp16_qk_reduction is not False or enable_pdl is not None:
            check.permission("use_fp16_qk_reduction", use_fp16_qk_reduction)
            check.permission("enable_pdl", enable_pdl)
        outputs_p = run_outputs(out_p, lse_p, return_lse, lse_base, lse_layout)
        outputs_d = run_outputs(out_d, lse_d, return_lse, lse_base, lse_layout)
        mask = (custom_mask_p, packed_custom_mask_p)
        causal = check.flag("causal_p", causal_p)
        both, joint = self._joint(causal, custom_mask_p is not None or mask[1] is not None)
        decode = both.decode
        scales_d = decode.scales
        if q_scale is not None or k_scale is not None or v_scale is not None:
            given = GivenScales(q_scale, k_scale, v_scale)
            scales_d = folded_scales(scales_d.logits, given, decode.asked.request.options)
        masked = joint.prefill.options.mask == _core.Mask.custom
        packed = self._mask(*mask, joint.prefill) if masked else None
        runs = [
            SegmentRun(q_p, paged_kv_cache_p, both.prefill.scales, outputs_p),
            SegmentRun(q_d, paged_kv_cache_d, scales_d, outputs_d),
        ]
        return self._joints.run((causal, masked), joint, runs, packed)

    forward = run

    @check.eager
    def _joint(self, causal: bool, masked: bool) -> tuple[_BothPlanned, Joint]:
        both = self._planned()
        key = (causal, masked)
        joint = self._joints.find(key, both)
        if joint is None:
            request = both.prefill.request
            options = request.options.replace(
                causal=causal and not masked,
                mask=_core.Mask.custom if masked else _core.Mask.bounds,
            )
            batch, pages = request.lengths
            lengths = Lengths(batch.with_mask() if masked else batch, pages)
            request = request._replace(options=options, lengths=lengths)
            joint = self._joints.make(key, both, request, both.decode)
        return both, joint

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Result, Result]:
        """run() with return_lse=True."""
        return self.run(*args, **{"return_lse": True, **kwargs})

    forward_return_lse = run_return_lse
