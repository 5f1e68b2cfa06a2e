"""The wrapper of ragged KV caches, preflash.prefill.BatchPrefillWithRaggedKVCacheWrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._check import validate
from .._check.arguments import Result, RunKwargs, Scale
from .._check.calls import RaggedForwardArguments, RaggedPlanArguments
from .._check.names import tells_nearest
from .._check.outputs import DEFAULT_OUTPUTS, Outputs, run_outputs
from .._check.torch_modes import function_mode_is_active, is_dynamo_compiling, num_dispatch_modes
from .._compat import sink_variant
from .._compat.engine_attributes import RaggedEngineAttributes
from .._compat.signatures import by_position, forwards, plans, takes
from .batch import BatchPrefillWrapper
from .options import lists_options, quick_variant, run_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


_ARRAYS = {"qo_indptr": "qo_indptr", "kv_indptr": "kv_indptr", "seq_lens": "kv_lens"}


class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefillWrapper, RaggedEngineAttributes):
    """Attention of a batch over a ragged KV cache: plan() once, run() for every layer.

    The keys of request i are rows kv_indptr[i] to kv_indptr[i + 1] of one tensor.

    Args:
        kv_layout: "NHD": k and v are [tokens, num_kv_heads, head_dim]; "HND": [num_kv_heads,
            tokens, head_dim].
        qo_indptr_buf, kv_indptr_buf: int32 [batch_size + 1], on the wrapper's device.
        The others are those of BatchPrefillWithPagedKVCacheWrapper.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: another variant in jit_args.
    """

    @tells_nearest
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        qk_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        *,
        mask_indptr_buf: torch.Tensor | None = None,
        jit_args: Sequence[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._constructor_options = sink_variant.options_of(jit_args, jit_kwargs)
        validate.neutral("variant_owns_mask", variant_owns_mask, False)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, qo_indptr_buf=qo_indptr_buf,
            kv_indptr_buf=kv_indptr_buf, custom_mask_buf=custom_mask_buf,
            qk_indptr_buf=qk_indptr_buf, mask_indptr_buf=mask_indptr_buf,
        )  # fmt: skip
        if jit_args is not None:
            sink_variant.give_run(self, paged=False)

    @plans(RaggedPlanArguments, **_ARRAYS)
    def plan(self, a: RaggedPlanArguments) -> None:
        """Chooses a kernel and makes its work list for a batch of these lengths.

        Note the order: window_left and logits_soft_cap come before sm_scale here, after it in the
        paged wrapper.

        Args:
            qo_indptr: [batch_size + 1] int32, first token of each request in q, on the CPU (which
                costs no wait for the GPU) or on the wrapper's device (copied back once).
            kv_indptr: [batch_size + 1] int32, first token of each request in k and v. A request has
                at most 2^30 keys.
            v_indptr, o_indptr: where each request begins in v and the output: kv_indptr and
                qo_indptr again, in tokens or in elements. Those on the GPU are waited for.
            The others, and the errors, are those of BatchPrefillWithPagedKVCacheWrapper.plan().
        """
        super()._make_plan(a)

    @plans(RaggedPlanArguments, **_ARRAYS)
    def begin_forward(self, a: RaggedPlanArguments) -> None:
        """plan(), but made for what forward() last asked for, as in
        BatchPrefillWithPagedKVCacheWrapper.begin_forward()."""
        super()._begin_forward(a)

    @takes(RaggedPlanArguments)
    def workspace_size(self, a: RaggedPlanArguments) -> tuple[int, int]:
        """(float_bytes, int_bytes) that plan() with these arguments uses at most, as in
        BatchPrefillWithPagedKVCacheWrapper.workspace_size()."""
        return super()._workspace_size(a)

    _by_position = ("return_lse",)

    @by_position(*_by_position)
    @lists_options
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        return_lse: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        q_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        sinks: torch.Tensor | None = None,
        **options: Unpack[RunKwargs],
    ) -> Result:
        """Computes one layer of the planned batch on the current stream.

        Args:
            q: [at least qo_indptr[-1], num_qo_heads, head_dim]. Rows before the first request and
                after the last are padding and are not read.
            k: [at least kv_indptr[-1], num_kv_heads, head_dim] (NHD) or [num_kv_heads, at least
                kv_indptr[-1], head_dim] (HND); any strides but a contiguous last dimension.
            v: like k with head_dim_vo.
            The others, the result and the errors are those of
            BatchPrefillWithPagedKVCacheWrapper.run(); scale_q, scale_k and scale_v may also follow
            v by position, a float for all heads.
        """
        if (
            args
            or return_lse is None
            or is_dynamo_compiling()
            or function_mode_is_active()
            or num_dispatch_modes()
            or (variant := (plan := self._plan).default_variant) is None
            or (options and (variant := quick_variant(plan, options)) is None)
        ):
            given = run_options(self, (args, q_scale, k_scale, v_scale, sinks), options)
            outputs = Outputs(out, lse, return_lse, lse_base, lse_layout)
            return super()._run(q, (k, v), given, outputs)
        outputs = run_outputs(out, lse, return_lse, lse_base, lse_layout)
        scales = (q_scale, k_scale, v_scale)
        return super()._run_quick(plan, variant, q, (k, v), scales, sinks, outputs)

    def run_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run(q, k, v, *args, return_lse=True, **options)

    @forwards(RaggedForwardArguments)
    def forward(self, a: RaggedForwardArguments) -> torch.Tensor:
        """Deprecated: run() with its own options, as
        BatchPrefillWithPagedKVCacheWrapper.forward()."""
        return super()._forward(a.q, (a.k, a.v), a, DEFAULT_OUTPUTS)

    @forwards(RaggedForwardArguments)
    def forward_return_lse(self, a: RaggedForwardArguments) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: forward() that returns (out, lse), lse base 2 and [tokens, num_qo_heads]."""
        return super()._forward(a.q, (a.k, a.v), a, Outputs(return_lse=True))
