"""Prefills beside decode requests, both over paged KV caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _core
from .._check import torch_modes, validate
from .._check.arguments import GivenScales, KvCache, Result, Scale, converted
from .._check.calls import BatchPodPlanArguments, PagedPlanArguments
from .._check.names import tells_nearest
from .._check.outputs import run_outputs
from .._check.request import Request
from .._check.scales import folded_scales
from .._compat.engine_attributes import (
    fixed_property,
    forwards,
    planned_array,
    planned_pages,
    readonly_property,
)
from .._compat.signatures import takes
from .._device import backends
from .._run.variant import SegmentRun, error_context
from .._wrappers.decode import data_types
from .._wrappers.paged import BatchPrefillWithPagedKVCacheWrapper
from .._wrappers.plan import Plan
from .pod_plan import SIDES, PodPlan, PodPlanCache, PodWrapper


def _prefill_array(read: Callable[[Request], torch.Tensor]) -> readonly_property:
    """Read-only attribute: an array that plan() got for the prefills; None before plan()."""

    def find(wrapper: Any) -> torch.Tensor | None:
        request = wrapper._decode._plan.request
        return None if request is None else read(request.prefill)

    return readonly_property(find)


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

    The constructor is that of PODWithPagedKVCacheWrapper; kv_layout is that of both caches.
    """

    @tells_nearest
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        backends.requested(backend)  # without "cudnn", which the wrappers of a side take
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)
            for _ in SIDES
        )
        self._pod_plans = PodPlanCache(self._decode)

    # Attributes that callers read, of the prefills and of the decode requests.
    _use_cuda_graph = fixed_property(
        False, "CUDA graphs need a fixed batch: use PODWithPagedKVCacheWrapper"
    )
    _pin_memory_int_workspace_buffer_p = None
    _pin_memory_int_workspace_buffer_d = None
    _qo_indptr_buf_p = _prefill_array(lambda of: planned_array(of.batch.qo_indptr, of.device))
    _kv_indptr_buf_p = _prefill_array(lambda of: planned_array(of.batch.kv_indptr, of.device))
    _kv_indices_buf_p = _prefill_array(planned_pages)
    _kv_last_page_len_buf_p = _prefill_array(
        lambda of: planned_array(of.batch.last_page_len, of.device)
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
            What PODWithPagedKVCacheWrapper.plan() raises; the wrapper keeps the plan it had.
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
                seq_lens=getattr(a, f"seq_lens_{side}"),
            )
            for side in "pd"
        )
        self._plan(prefill, decode)

    begin_forward = plan

    @torch_modes.eager
    def _plan(self, prefill: PagedPlanArguments, decode: PagedPlanArguments) -> None:
        with error_context(SIDES[0]):
            plan_p, _ = self._prefill._drafted(prefill)
        with error_context(SIDES[1]):
            plan_d, _ = self._decode._drafted(decode)
        # In one step, so that run() finds both sides of one plan() after any interrupt.
        both = plan_d.request._replace(prefill=plan_p.request)
        self._decode._install(plan_d._replace(request=both))
        self._pod_plans.forget()

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
            return_lse: also return the log-sum-exp of both sides.
            The others are those of PODWithPagedKVCacheWrapper.run().

        Returns:
            (out_p, out_d), or ((out_p, lse_p), (out_d, lse_d)) with return_lse.

        Raises:
            What PODWithPagedKVCacheWrapper.run() raises. Nothing is launched.
        """
        self._check_call(use_fp16_qk_reduction, enable_pdl)
        outputs_p = run_outputs(out_p, lse_p, return_lse, lse_base, lse_layout)
        outputs_d = run_outputs(out_d, lse_d, return_lse, lse_base, lse_layout)
        causal = validate.flag("causal_p", causal_p)
        masked = custom_mask_p is not None or packed_custom_mask_p is not None
        plan, pod_plan = self._pod_plan(causal, masked)
        scales_d = plan.request.scales
        if q_scale is not None or k_scale is not None or v_scale is not None:
            given = GivenScales(q_scale, k_scale, v_scale)
            scales_d = folded_scales(scales_d.logits, given, pod_plan.decode_options)
        memory = self._memory(custom_mask_p, packed_custom_mask_p, pod_plan) if masked else None
        scales_p = plan.request.prefill.scales
        prefill = SegmentRun(q_p, paged_kv_cache_p, scales_p, outputs_p, memory)
        decode = SegmentRun(q_d, paged_kv_cache_d, scales_d, outputs_d)
        return self._pod_plans.run((causal, masked), pod_plan, prefill, decode)

    forward = run

    @torch_modes.eager
    def _pod_plan(self, causal: bool, masked: bool) -> tuple[Plan, PodPlan]:
        plan = self._decode._current()
        key = (causal, masked)
        pod_plan = self._pod_plans.find(key, plan)
        if pod_plan is None:
            request = plan.request.prefill
            if masked and request.kv_lens is not None:
                raise NotImplementedError(
                    "custom_mask_p with lengths_are_upper_bounds=True in plan(): the rows of a "
                    "mask are as long as the keys; plan with exact lengths"
                )
            options = request.options.replace(
                causal=causal and not masked,
                mask=_core.Mask.custom if masked else _core.Mask.bounds,
            )
            batch = request.batch.with_mask() if masked else request.batch
            request = request._replace(options=options, batch=batch)
            pod_plan = self._pod_plans.make(key, request, plan)
        return plan, pod_plan

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Result, Result]:
        """run() with return_lse=True."""
        return self.run(*args, **{"return_lse": True, **kwargs})

    forward_return_lse = run_return_lse
