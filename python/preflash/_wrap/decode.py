"""The wrapper of decode batches, preflash.decode.BatchDecodeWithPagedKVCacheWrapper."""

# NOTE: the API fixes long signatures; see prefill.py.

from __future__ import annotations

import inspect
from typing import Any

import torch

from .._check import values as check
from .._check.arguments import (
    DecodePlanArguments,
    ForwardArguments,
    GivenScales,
    KvCache,
    PagedPlanArguments,
    Result,
    Scale,
)
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._compat.signatures import NEWER_DECODE_ORDER, newer_spellings, same_arguments_as
from .paged import BatchPrefillWithPagedKVCacheWrapper


def data_types(q_data_type: Any, kv_data_type: Any, data_type: Any) -> tuple[Any, Any]:
    """Those of q and of the cache, where the deprecated data_type may stand for both."""
    if data_type is not None:
        # NOTE: "float16" is q_data_type's default, so it cannot be told from its absence. An 8-bit
        # one is then that of the cache alone.
        checked = check.dtype("data_type", data_type)
        eight_bits = checked in check.FP8_DTYPES
        if q_data_type is None or (q_data_type == "float16" and not eight_bits):
            q_data_type = data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        used = (
            check.dtype("q_data_type", q_data_type),
            check.dtype("kv_data_type", kv_data_type),
        )
        if checked not in used:
            raise ValueError(
                f"data_type={data_type}: deprecated, and neither q_data_type={q_data_type} "
                f"nor kv_data_type={kv_data_type}; leave it None"
            )
    return "float16" if q_data_type is None else q_data_type, kv_data_type


_RUN_OPTIONS = {
    name
    for name, parameter in inspect.signature(
        BatchPrefillWithPagedKVCacheWrapper.run
    ).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Attention of one query per request over a paged KV cache: plan() once, run() for every layer.

    Args:
        float_workspace_buffer, kv_layout, backend, jit_args: as in
            BatchPrefillWithPagedKVCacheWrapper.
        use_cuda_graph: plan() keeps its arrays in the buffers, and a captured run() replays what
            was planned last, as in BatchPrefillWithPagedKVCacheWrapper. The batch size is
            len(paged_kv_last_page_len_buffer).
        use_tensor_cores: a permission; the same kernels serve both.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: backend="cudnn".
    """

    _serves_cudnn = False

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: None = None,
    ) -> None:
        self._use_tensor_cores = check.flag("use_tensor_cores", use_tensor_cores)
        qo_indptr = None
        if check.flag("use_cuda_graph", use_cuda_graph) and isinstance(
            paged_kv_last_page_len_buffer, torch.Tensor
        ):
            qo_indptr = _one_query_each(paged_kv_last_page_len_buffer)
            qo_indptr = qo_indptr.to(paged_kv_last_page_len_buffer.device)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr,
            paged_kv_indptr_buf=paged_kv_indptr_buffer,
            paged_kv_indices_buf=paged_kv_indices_buffer,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buffer,
            backend=backend,
            jit_args=jit_args,
        )

    @property
    def use_tensor_cores(self) -> bool:
        """As the constructor was told."""
        return self._use_tensor_cores

    @newer_spellings(NEWER_DECODE_ORDER)
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: Scale = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        o_data_type: str | torch.dtype | None = None,
        q_len_per_req: int | None = 1,
    ) -> None:
        """Chooses a kernel and makes its work list for a batch of these KV lengths.

        Args:
            indptr: [batch_size + 1] int32, first entry of each request in indices.
            indices: at least [indptr[-1]] int32, pages.
            last_page_len: [batch_size] int32, in [1, page_size].
            data_type: deprecated; that of q and of k and v, where q_data_type is None or "float16"
                and kv_data_type is None. An fp8 one is that of q where q_data_type is None only.
            o_data_type: as in BatchPrefillWithPagedKVCacheWrapper.plan().
            q_len_per_req: 1 or None; more queries per request are for the prefill wrapper.
            The others are those of BatchPrefillWithPagedKVCacheWrapper.plan(), fixed_split_size
            (in keys) included.

        Raises:
            TypeError, ValueError: an argument is wrong, or a workspace too small.
            NotImplementedError: no compiled kernel serves it, or an option of a later release.
            The wrapper keeps the plan it had.
        """
        a = DecodePlanArguments(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, data_type,
            sm_scale, rope_scale, rope_theta, non_blocking, block_tables, seq_lens,
            fixed_split_size, disable_split_kv, o_data_type, q_len_per_req,
        )  # fmt: skip
        super()._plan(self._as_prefill(a))

    @same_arguments_as(plan, DecodePlanArguments)
    def begin_forward(self, a: DecodePlanArguments) -> None:
        """plan(), but made for what forward() last asked for, as in
        BatchPrefillWithPagedKVCacheWrapper.begin_forward()."""
        super()._begin_forward(self._as_prefill(a))

    @same_arguments_as(plan, DecodePlanArguments)
    def workspace_size(self, a: DecodePlanArguments) -> tuple[int, int]:
        """(float_bytes, int_bytes) that plan() with these arguments uses at most. Plans nothing.

        With use_cuda_graph and fixed_split_size both grow with the float workspace, all of which
        is for longer keys of later plans: what these arguments need."""
        return super()._workspace_size(self._as_prefill(a))

    def _as_prefill(self, a: DecodePlanArguments) -> PagedPlanArguments:
        check.neutral("q_len_per_req", a.q_len_per_req, 1)
        q_data_type, kv_data_type = data_types(a.q_data_type, a.kv_data_type, a.data_type)
        qo_indptr = _one_query_each(a.last_page_len)
        # Here, where the two have the names that the caller knows.
        if check.is_tensor("indptr", a.indptr).numel() != qo_indptr.numel():
            raise ValueError(
                f"indptr has {a.indptr.numel()} elements and last_page_len "
                f"{a.last_page_len.numel()}; must have batch_size + 1 and batch_size"
            )
        return self._paged_arguments(
            qo_indptr,
            a.indptr,
            a.indices,
            a.last_page_len,
            a.num_qo_heads,
            a.num_kv_heads,
            a.head_dim,
            a.page_size,
            pos_encoding_mode=a.pos_encoding_mode,
            window_left=a.window_left,
            logits_soft_cap=a.logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=a.sm_scale,
            rope_scale=a.rope_scale,
            rope_theta=a.rope_theta,
            non_blocking=a.non_blocking,
            block_tables=a.block_tables,
            seq_lens=a.seq_lens,
            fixed_split_size=a.fixed_split_size,
            disable_split_kv=a.disable_split_kv,
            o_data_type=a.o_data_type,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        *args: None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = 1,
        **options: Any,
    ) -> Result:
        """Computes one layer of the planned batch on the current stream.

        Args:
            q: [at least batch_size, num_qo_heads, head_dim]; rows behind the last request are
                neither read nor written.
            q_len_per_req: 1 or None.
            The others are those of BatchPrefillWithPagedKVCacheWrapper.run(), all of them.

        Returns:
            out [rows of q, num_qo_heads, head_dim], or (out, lse) with return_lse.

        Raises:
            TypeError, ValueError: not planned, or a tensor is not what was planned. Nothing is
            launched. NotImplementedError: an option of a later release.
        """
        check.nothing_more("run", args)
        check.neutral("q_len_per_req", q_len_per_req, 1)
        if options and (unknown := options.keys() - _RUN_OPTIONS):
            raise TypeError(
                "BatchDecodeWithPagedKVCacheWrapper.run() got an unexpected keyword argument "
                f"{min(unknown)!r}"
            )
        return super().run(
            q,
            paged_kv_cache,
            k_scale,
            v_scale,
            return_lse,
            q_scale=q_scale,
            out=out,
            lse=lse,
            enable_pdl=enable_pdl,
            window_left=window_left,
            sinks=sinks,
            **options,
        )

    @property
    def resolved_backend(self) -> str:
        """The backend that the last plan() chose; before one, what the constructor was given."""
        return self._backend

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: Scale = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Deprecated: run() with its own options; they replace those of plan(), defaults
        included."""
        return super()._forward(
            q,
            paged_kv_cache,
            ForwardArguments(
                causal=False,
                pos_encoding_mode=pos_encoding_mode,
                allow_fp16_qk_reduction=None,
                use_fp16_qk_reduction=False,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                sm_scale=sm_scale,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                scales=GivenScales(q_scale, k_scale, v_scale),
            ),
            DEFAULT_OUTPUTS,
        )

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: Scale = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: forward() that returns (out, lse), lse base 2 and [tokens, num_qo_heads]."""
        return super()._forward(
            q,
            paged_kv_cache,
            ForwardArguments(
                causal=False,
                pos_encoding_mode=pos_encoding_mode,
                allow_fp16_qk_reduction=None,
                use_fp16_qk_reduction=False,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                sm_scale=sm_scale,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                scales=GivenScales(q_scale, k_scale, v_scale),
            ),
            Outputs(return_lse=True),
        )


def _one_query_each(last_page_len: torch.Tensor) -> torch.Tensor:
    """qo_indptr of a batch with one query per request; made on the host, where plan() reads it."""
    check.is_tensor("last_page_len", last_page_len)
    return torch.arange(last_page_len.numel() + 1, dtype=torch.int32, device="cpu")
