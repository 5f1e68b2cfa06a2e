"""Prefill on decode (POD): a prefill and a decode batch side by side in one launch.

A prefill keeps the tensor cores busy and a decode batch the memory, so that each hides under the
other. Both are segments of one work list (docs/guide.md).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from . import _core
from ._check import torch_modes, validate
from ._check.arguments import GivenScales, KvCache, Result, Scale, converted
from ._check.calls import (
    DecodePlanArguments,
    PodPlanArguments,
    SingleArguments,
)
from ._check.lengths import single_batch
from ._check.names import tells_nearest
from ._check.options import has_mask, single_key, single_options
from ._check.outputs import Outputs, outputs_of, run_outputs
from ._check.request import Request
from ._check.scales import Scales, folded_scales, softmax_scale
from ._compat.engine_attributes import forwards
from ._compat.signatures import takes
from ._plan import prepass
from ._plan.masks import check_rows
from ._pod.batch import BatchPODWithPagedKVCacheWrapper
from ._pod.pod_plan import SIDES, PodPlanCache, PodWrapper
from ._run.variant import SegmentRun, error_context
from ._wrappers.decode import BatchDecodeWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


@forwards(
    "_decode", "_fixed_batch_size", "_use_tensor_cores", "_plan_info", "_float_workspace_buffer",
    "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_qo_indptr_buf",
    "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf",
)  # fmt: skip
class PODWithPagedKVCacheWrapper(PodWrapper):
    """One prefill beside a batch of decode requests over a paged KV cache.

    plan() looks at the decode batch. run() brings a prefill of one request beside it; its lengths
    and options are planned together with the batch when they are first seen, so that further
    layers only launch.

    Both sides are one launch wherever a kernel takes both: on the CPU always, on a GPU where q, k
    and v of both have one 16-bit dtype, head_dim is at most 256 and neither has ALiBi or RoPE; on
    "fa2" the prefill may have a custom mask. All else, a side without queries, and on "fa2" sides
    of which one has so much more work that one launch would be slower, runs as two launches, one
    after the other, with the same results (`variant` names both kernels then).

    Args:
        float_workspace_buffer, kv_layout, backend, paged_kv_indptr_buffer, paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer: as in BatchPrefillWithPagedKVCacheWrapper, where the last
            three end in _buf. kv_layout is that of the paged cache.
        use_cuda_graph: plan() keeps its arrays in the buffers, and a captured run() replays what
            was planned last, beside a prefill of the captured lengths. Call run() once before the
            capture. The batch size is len(paged_kv_last_page_len_buffer).
        jit_args: None only: nothing is compiled at run time.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: backend="cudnn".
    """

    @tells_nearest
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: None = None,
        *,
        backend: str = "auto",
    ) -> None:
        validate.neutral("jit_args", jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend=backend,
        )  # fmt: skip
        self._pod_plans = PodPlanCache(self._decode)

    @takes(PodPlanArguments)
    def plan(self, a: PodPlanArguments) -> None:
        """Plans the decode side. The arguments are those of
        BatchDecodeWithPagedKVCacheWrapper.plan(), and the options hold for the decode side alone.

        Raises:
            TypeError, ValueError: an argument is wrong, or a workspace too small.
            NotImplementedError: no compiled kernel serves it, or it is recorded by torch.compile.
            The wrapper keeps the plan it had.
        """
        self._plan(converted(a, DecodePlanArguments))

    begin_forward = plan

    @torch_modes.eager
    def _plan(self, a: DecodePlanArguments) -> None:
        decode, pod_plans = self._decode, self._pod_plans
        plan, copy_in = decode._drafted(*decode._as_prefill(a))
        graph_drafts = pod_plans.drafts(plan.request) if decode.is_cuda_graph_enabled else []
        decode._install(plan, copy_in)
        pod_plans.forget()
        pod_plans.write(graph_drafts, decode._current())

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: KvCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: Scale = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: None = None,
        packed_custom_mask_d: None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: Scale = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: None,
        out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> tuple[Result, Result]:
        """Computes one layer of a prefill and of the planned decode batch on the current stream.

        Args:
            q_p, k_p, v_p, custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p,
            pos_encoding_mode_p, sm_scale_p, window_left_p, rope_scale_p, rope_theta_p: those of
                single_prefill_with_kv_cache. q_p has as many heads as the plan, k_p and v_p too.
            q_d: [batch_size, num_qo_heads, head_dim].
            paged_kv_cache_d: as in BatchPrefillWithPagedKVCacheWrapper.run().
            causal_d: either value: the diagonal of one query is its last key.
            kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d:
                the default, or what plan() and the constructor were given.
            custom_mask_d, packed_custom_mask_d: None only.
            q_scale, k_scale, v_scale: of the decode side; floats or one-element tensors.
            return_lse_p, return_lse_d: also return the log-sum-exp of that side.
            use_fp16_qk_reduction, enable_pdl: permissions.
            out_p, lse_p, out_d, lse_d, lse_base, lse_layout: as in single_prefill_with_kv_cache.

        Returns:
            (out_p, out_d); with return_lse_p the first is (out, lse), with return_lse_d the second.

        Raises:
            TypeError, ValueError: not planned, an option of the decode side differs from its plan,
            or a tensor from what was planned. Nothing is launched.
            NotImplementedError: no compiled kernel serves it, or it is recorded by torch.compile.
        """
        self._check_call(use_fp16_qk_reduction, enable_pdl)
        if args:
            validate.nothing_more("run", args)
        if custom_mask_d is not None or packed_custom_mask_d is not None:
            name = "custom_mask_d" if custom_mask_d is not None else "packed_custom_mask_d"
            raise ValueError(
                f"{name}: plan() made the decode side without a mask; leave it None, or plan these "
                "requests with BatchPrefillWithPagedKVCacheWrapper, which takes one"
            )
        if causal_d is not False:
            validate.flag("causal_d", causal_d)
        validate.flag("causal_p", causal_p)
        validate.flag("return_lse_p", return_lse_p)
        validate.flag("return_lse_d", return_lse_d)
        repeated = (
            kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d,
        )  # fmt: skip
        prefill = SingleArguments(
            q_p, k_p, v_p, custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p,
            pos_encoding_mode_p, False, sm_scale_p, window_left_p, None, rope_scale_p, rope_theta_p,
            out=out_p, lse=lse_p, return_lse=return_lse_p, lse_base=lse_base, lse_layout=lse_layout,
        )  # fmt: skip
        scales = GivenScales(q_scale, k_scale, v_scale)
        outputs = run_outputs(out_d, lse_d, return_lse_d, lse_base, lse_layout)
        return self._run(prefill, q_d, paged_kv_cache_d, repeated, scales, outputs)

    forward = run

    @torch_modes.eager
    def _run(
        self,
        given: SingleArguments,
        q_d: torch.Tensor,
        kv_d: KvCache,
        repeated: tuple,
        scales: GivenScales,
        outputs: Outputs,
    ) -> tuple[Result, Result]:
        outputs_p = outputs_of(given)
        plan = self._decode._current()
        decode_options = plan.request.options
        # By identity: a tensor is equal to nothing as a whole.
        if any(map(operator.is_not, repeated, _NOTHING)):
            _check_repeated(repeated, plan.request)
        key, pod_plan = None, None
        try:
            key = _key(given)
            pod_plan = self._pod_plans.find(key, plan)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass  # no ordinary tensors, or an option without a hash: the checks say which one it is
        if pod_plan is None:
            with error_context(SIDES[0]):
                request = self._prefill_request(given, decode_options)
            key = _key(given)
            pod_plan = self._pod_plans.make(key, request, plan)
        batch, options = pod_plan.prefill.batch, pod_plan.prefill.options
        if given.sm_scale is None:
            scales_p = Scales(softmax_scale(None, options), 1.0)
        else:
            with error_context(SIDES[0]):
                scales_p = Scales(softmax_scale(given.sm_scale, options), 1.0)
        scales_d = plan.request.scales
        if scales.given:
            scales_d = folded_scales(scales_d.logits, scales, decode_options)
        memory = None
        if has_mask(given):
            if given.packed_custom_mask is None:
                with error_context(SIDES[0]):
                    check_rows(given.custom_mask, (batch.qo_end, batch.kv_end))
            memory = self._memory(given.custom_mask, given.packed_custom_mask, pod_plan)
        prefill = SegmentRun(given.q, (given.k, given.v), scales_p, outputs_p, memory)
        return self._pod_plans.run(key, pod_plan, prefill, SegmentRun(q_d, kv_d, scales_d, outputs))

    def _prefill_request(self, given: SingleArguments, decode: _core.AttentionOptions) -> Request:
        q, k, v = given.q, given.k, given.v
        for name, value in (("q_p", q), ("k_p", k), ("v_p", v)):
            validate.tensor(name, value)
            validate.on_device(name, value, self.device)
        torch_modes.forward_only(q=q, k=k, v=v)
        options = single_options(given)
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"):
            if getattr(options, name) != getattr(decode, name):
                raise ValueError(
                    f"{name} = {getattr(options, name)}: the decode side was planned with "
                    f"{getattr(decode, name)}, and both sides have the same"
                )
        batch = single_batch(q.shape[0], k.shape[0 if given.kv_layout == "NHD" else 1])
        if has_mask(given):
            batch.use_mask()
        graph_rows = max(q.shape[0], 1) if self.is_cuda_graph_enabled else 0
        options = prepass.applied_to(options)
        options = options.replace(disable_split=decode.disable_split)
        return Request(options, self.device, batch, None, given.kv_layout, graph_rows=graph_rows)

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Result, Result]:
        """run() with return_lse_p=True and return_lse_d=True."""
        return self.run(*args, **{"return_lse_p": True, "return_lse_d": True, **kwargs})

    forward_return_lse = run_return_lse


def _key(given: SingleArguments) -> tuple:
    q, k, v = given.q, given.k, given.v
    return (q.shape, k.shape, v.shape, q.dtype, k.dtype, q.device, single_key(given))


# Options of run() that repeat what plan() said of the decode side: the default, which says nothing,
# because it cannot be told from an argument that was left out; and how plan() reads them.
_REPEATED: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "kv_layout": ("NHD", functools.partial(validate.one_of, allowed=validate.KV_LAYOUTS)),
    "pos_encoding_mode": (
        "NONE",
        functools.partial(validate.one_of, allowed=validate.ENCODING_MODES),
    ),
    "sm_scale": (None, validate.scale),
    "window_left": (-1, validate.window_left),
    "rope_scale": (None, validate.real),
    "rope_theta": (None, validate.real),
}
_NOTHING = tuple(default for default, _ in _REPEATED.values())


def _check_repeated(given: tuple, planned: Request) -> None:
    """Raises ValueError where one of them contradicts what was planned. given: in their order."""
    options = planned.options
    told = (
        planned.kv_layout, validate.MODE_OF[options.position], planned.scales.logits,
        options.window_left, options.rope_scale, options.rope_theta,
    )  # fmt: skip
    for (name, (default, read)), value, now in zip(_REPEATED.items(), given, told, strict=True):
        if value is default:
            continue
        value = read(f"{name}_d", value)
        close = name == "sm_scale" and math.isclose(value, now, rel_tol=1e-6)
        if not close and value not in (now, default):
            raise ValueError(
                f"{name}_d={value!r}: the decode side was planned with {now!r}; leave it out, "
                f"or call plan() with {name}={value!r}"
            )
