"""The wrapper of decode batches, preflash.decode.BatchDecodeWithPagedKVCacheWrapper."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._check import dtypes, torch_modes, validate
from .._check.arguments import KvCache, Result, Scale, converted
from .._check.calls import (
    DecodeForwardArguments,
    DecodePlanArguments,
    FastDecodePlanArguments,
    PagedPlanArguments,
)
from .._check.lengths import IndexArrays
from .._check.names import REFUSALS, raise_renamed, renamed, tells_nearest
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.request import Request
from .._check.tensors import check_decode_rows
from .._compat.engine_attributes import planned_pages
from .._compat.signatures import forwards, plans, takes
from .graph import required_buffer
from .options import lists_options_of
from .paged import BatchPrefillWithPagedKVCacheWrapper


def data_types(q_data_type: Any, kv_data_type: Any, data_type: Any) -> tuple[Any, Any]:
    """Dtypes of q and of the cache; the deprecated data_type may stand for both."""
    if data_type is not None:
        # "float16" is q_data_type's default, so it cannot be told from its absence. An 8-bit
        # one is then that of the cache alone.
        checked = validate.dtype("data_type", data_type)
        eight_bits = checked in dtypes.FP8_DTYPES
        if q_data_type is None or (q_data_type == "float16" and not eight_bits):
            q_data_type = data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        q_dtype = validate.dtype("q_data_type", q_data_type)
        if checked not in (q_dtype, validate.dtype("kv_data_type", kv_data_type)):
            raise ValueError(
                f"data_type={data_type}: deprecated, and neither q_data_type={q_data_type} "
                f"nor kv_data_type={kv_data_type}; leave it None"
            )
    return "float16" if q_data_type is None else q_data_type, kv_data_type


# Arguments of the paged wrapper's plan() by their names in this module's.
_NAMES = {
    "paged_kv_indptr": "indptr",
    "paged_kv_indices": "indices",
    "paged_kv_last_page_len": "last_page_len",
}

# Arguments of plan() that are tensors, all absent.
_NO_ARRAYS = dict.fromkeys(("indptr", "indices", "last_page_len", "seq_lens", "block_tables"))
# Index arrays of plan() (_core.RepeatedPlan).
ARRAYS = {"indptr": "kv_indptr", "indices": "indices", "last_page_len": "last_page_len"}


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Attention of one query per request over a paged KV cache: plan() once, run() for every layer.

    Args:
        float_workspace_buffer, kv_layout, backend, jit_args: as in
            BatchPrefillWithPagedKVCacheWrapper.
        use_cuda_graph: as in BatchPrefillWithPagedKVCacheWrapper. The batch size is
            len(paged_kv_last_page_len_buffer).
        use_tensor_cores: a permission; the same kernels serve both.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: backend="cudnn".
    """

    _takes_cudnn = False
    _had_several = False  # True once a plan() had several queries per request
    # A call of plan() whose options are planned; None: no plan(), or begin_forward() came after it.
    _made_from: DecodePlanArguments | None = None

    @tells_nearest
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
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        self._use_tensor_cores = validate.flag("use_tensor_cores", use_tensor_cores)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, None, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend=backend,
            jit_args=jit_args,
        )  # fmt: skip

    def _take_graph_buffers(self) -> None:
        given = self._given_buffers
        if given["qo_indptr_buf"] is not None:
            super()._take_graph_buffers()
            return
        last_page_len = required_buffer("paged_kv_last_page_len_buf", given)
        each = _one_query_each(last_page_len)
        qo_indptr = each.to(last_page_len.device, copy=True)
        self._given_buffers = {**given, "qo_indptr_buf": qo_indptr}
        super()._take_graph_buffers()
        self._graph.filled_with = each

    @property
    def use_tensor_cores(self) -> bool:
        """The constructor's use_tensor_cores."""
        return self._use_tensor_cores

    @plans(DecodePlanArguments, **ARRAYS, seq_lens="kv_lens")
    def plan(self, a: DecodePlanArguments) -> None:
        """Chooses a kernel and makes its work list for a batch of these KV lengths.

        Args:
            indptr: [batch_size + 1] int32, first entry of each request in indices.
            indices: at least [indptr[-1]] int32, pages.
            last_page_len: [batch_size] int32, in [1, page_size].
            data_type: deprecated; that of q and of k and v, where q_data_type is None or "float16"
                and kv_data_type is None. An fp8 one is that of q where q_data_type is None only.
            o_data_type: as in BatchPrefillWithPagedKVCacheWrapper.plan().
            q_len_per_req: queries of every request, 1 by default. More than one are causal among
                themselves, the last of the request's keys; no request may then have fewer keys.
            The others, fixed_split_size (in keys) included, and the errors are those of
            BatchPrefillWithPagedKVCacheWrapper.plan(). There is no custom_mask: use that wrapper
            with one query per request.
        """
        super()._make_plan(*self._as_prefill(a))
        self._made_from = converted(a, DecodePlanArguments, **_NO_ARRAYS)

    @plans(DecodePlanArguments, **ARRAYS, seq_lens="kv_lens")
    def begin_forward(self, a: DecodePlanArguments) -> None:
        """plan(), but made for what forward() last asked for, as in
        BatchPrefillWithPagedKVCacheWrapper.begin_forward()."""
        self._begin_forward(*self._as_prefill(a))

    def _begin_forward(self, *a: Any) -> None:
        super()._begin_forward(*a)
        self._made_from = None

    def _drafted(self, *args: Any) -> Any:
        try:
            return super()._drafted(*args)
        except REFUSALS as error:
            raise_renamed(error, _NAMES)

    @takes(DecodePlanArguments)
    def workspace_size(self, a: DecodePlanArguments) -> tuple[int, int]:
        """(float_bytes, int_bytes) that plan() with these arguments uses at most, as in
        BatchPrefillWithPagedKVCacheWrapper.workspace_size()."""
        with renamed(_NAMES):
            return super()._workspace_size(*self._as_prefill(a))

    def _as_prefill(
        self, a: DecodePlanArguments | FastDecodePlanArguments
    ) -> tuple[PagedPlanArguments, IndexArrays]:
        """The arguments of a paged plan() but for its index arrays, and these."""
        q_len, indptr = a.q_len_per_req, a.indptr
        if type(a) is FastDecodePlanArguments:
            on_host = a.global_override_indptr_cpu
            if isinstance(q_len, torch.Tensor) and on_host is None:
                q_len, on_host = 1, q_len
            indptr = indptr if on_host is None else on_host
        q_len = 1 if q_len is None else validate.size("q_len_per_req", q_len)
        qo_indptr = _one_query_each(a.last_page_len)
        if q_len > 1:
            qo_indptr = qo_indptr * q_len
        # Here, where the two have the names that the caller knows.
        if validate.is_tensor("indptr", indptr).numel() != qo_indptr.numel():
            raise ValueError(
                f"indptr has {indptr.numel()} elements and last_page_len "
                f"{a.last_page_len.numel()}; must have batch_size + 1 and batch_size"
            )
        arrays = IndexArrays(qo_indptr, indptr, a.indices, a.last_page_len)
        q_data_type, kv_data_type = data_types(a.q_data_type, a.kv_data_type, a.data_type)
        prefill = converted(
            a, PagedPlanArguments, qo_indptr=None, paged_kv_indptr=None, paged_kv_indices=None,
            paged_kv_last_page_len=None, causal=q_len > 1, q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )  # fmt: skip
        return prefill, arrays

    def _request(self, a: PagedPlanArguments, arrays: IndexArrays | None = None) -> Request:
        request = super()._request(a, arrays)
        batch = request.batch
        batch.require_exact_rows()
        q_len = batch.max_qo_len
        if q_len <= 1:
            return request
        self._had_several = True
        shortest = min(batch.kv_len(i) for i in range(batch.num_requests))
        if shortest < q_len:
            raise ValueError(
                f"q_len_per_req={q_len}: a request has {shortest} keys, so that its first queries "
                "would see an empty KV range; every request must have q_len_per_req keys at least"
            )
        before = self._batch
        if self._graph is not None and before is not None and before.max_qo_len != q_len:
            raise ValueError(
                f"q_len_per_req={q_len}: with use_cuda_graph=True it is frozen, and the first "
                f"plan() had {before.max_qo_len}; use another wrapper"
            )
        return request

    @property
    def _q_len_per_req(self) -> int | None:
        """Queries per request of the plan; None before plan()."""
        return None if self._batch is None else max(self._batch.max_qo_len, 1)

    @lists_options_of(BatchPrefillWithPagedKVCacheWrapper.run)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        *args: Any,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        **options: Any,
    ) -> Result:
        """Computes one layer of the planned batch on the current stream.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            q_len_per_req: None: that of plan(). Another one, as callers of FlashInfer's trtllm-gen
                give it here alone, plans the same lengths and pages again; not after
                begin_forward(), nor with use_cuda_graph=True.
            The others, all of them, the result and the errors are those of
            BatchPrefillWithPagedKVCacheWrapper.run().
        """
        validate.one_cache(args)
        if len(args) != 3 or not isinstance(args[2], (torch.Tensor, float)):
            validate.nothing_more("run", args)
        if self._had_several or q_len_per_req is not None:
            self._check_queries(q, q_len_per_req)
        return super().run(
            q, paged_kv_cache, *args, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
            out=out, lse=lse, sinks=sinks, **options,
        )  # fmt: skip

    def _check_queries(self, q: torch.Tensor, q_len_per_req: int | None) -> None:
        planned, a = self._q_len_per_req or 1, self._made_from
        if q_len_per_req is None:
            asked = planned if a is None else a.q_len_per_req or 1
        else:
            asked = validate.size("q_len_per_req", q_len_per_req)
        if asked == planned:
            return
        if self._graph is not None or a is None:
            raise ValueError(
                f"q_len_per_req={asked} in run(), and plan() had {planned}: plan again"
            )
        # Before the plan changes; run() itself checks q against what is planned.
        check_decode_rows(q, self._batch.num_requests, asked)
        arrays = planned_arrays(self._plan.request)
        again = converted(a, DecodePlanArguments, q_len_per_req=asked, **arrays)
        self._make_plan(*self._as_prefill(again))

    @property
    def resolved_backend(self) -> str:
        """The backend that the last plan() chose; before one, what the constructor was given."""
        return self._planned_backend

    @forwards(DecodeForwardArguments)
    def forward(self, a: DecodeForwardArguments) -> torch.Tensor:
        """Deprecated: run() with its own options, as
        BatchPrefillWithPagedKVCacheWrapper.forward()."""
        return super()._forward(a.q, a.paged_kv_cache, a, DEFAULT_OUTPUTS)

    @forwards(DecodeForwardArguments)
    def forward_return_lse(self, a: DecodeForwardArguments) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: forward() that returns (out, lse), lse base 2 and [tokens, num_qo_heads]."""
        return super()._forward(a.q, a.paged_kv_cache, a, Outputs(return_lse=True))


def planned_arrays(request: Request) -> dict[str, torch.Tensor]:
    """The index arrays of a plan, as another plan() takes them."""
    pages, batch = request.pages.given, request.batch
    return {
        "indptr": torch.tensor(batch.kv_indptr, dtype=torch.int32, device="cpu"),
        "indices": pages if pages.dim() == 2 else planned_pages(request).as_subclass(torch.Tensor),
        "last_page_len": torch.tensor(batch.last_page_len, dtype=torch.int32, device="cpu"),
        "seq_lens": request.kv_lens,
    }


def _one_query_each(last_page_len: torch.Tensor) -> torch.Tensor:
    """qo_indptr of a batch with one query per request; made on the host, where plan() reads it."""
    return _numbers(validate.is_tensor("last_page_len", last_page_len).numel() + 1)


@functools.lru_cache(maxsize=16)  # NOTE: shared by all callers, so read-only
def _numbers(count: int) -> torch.Tensor:
    torch_modes.not_traced()  # a tensor of FakeTensorMode would stay
    return torch.arange(count, dtype=torch.int32, device="cpu")
