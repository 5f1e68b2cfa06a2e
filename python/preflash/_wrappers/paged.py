"""The wrapper of paged KV caches, preflash.prefill.BatchPrefillWithPagedKVCacheWrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._check import validate
from .._check.arguments import KvCache, Result, RunKwargs, Scale
from .._check.calls import PagedForwardArguments, PagedPlanArguments
from .._check.names import tells_nearest
from .._check.outputs import DEFAULT_OUTPUTS, Outputs, run_outputs
from .._check.torch_modes import function_mode_is_active, is_dynamo_compiling, num_dispatch_modes
from .._compat import sink_variant
from .._compat.engine_attributes import PagedEngineAttributes
from .._compat.signatures import by_position, forwards, plans, takes
from .batch import BatchPrefillWrapper
from .options import lists_options, quick_variant, run_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


_ARRAYS = {
    "qo_indptr": "qo_indptr",
    "paged_kv_indptr": "kv_indptr",
    "paged_kv_indices": "indices",
    "paged_kv_last_page_len": "last_page_len",
    "seq_lens": "kv_lens",
}


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefillWrapper, PagedEngineAttributes):
    """Attention of a batch of requests over a paged KV cache: plan() once, run() for every layer.

    A request's keys are the pages paged_kv_indices[paged_kv_indptr[i] : paged_kv_indptr[i + 1]],
    all full but the last, which holds paged_kv_last_page_len[i] tokens. plan() reads
    lengths, and page indices that are on the CPU; it chooses a kernel and makes its work list.
    `variant` and `repr()` say which one.

    Args:
        float_workspace_buffer: scratch memory for the partial results of split keys, any dtype; 128
            MB is plenty, and with less (even with none) keys are split less; plan() raises if it is
            too small for a fixed_split_size. Its device is the device of all tensors.
        kv_layout: "NHD" or "HND", the order inside a page.
        use_cuda_graph: plan() keeps its arrays in the buffers that follow, and a captured run()
            replays what was planned last. The batch size is fixed, and no plan may have more query
            rows than the first. Without it the buffers have no effect.
        qo_indptr_buf, paged_kv_indptr_buf: int32 [batch_size + 1], on the wrapper's device.
        paged_kv_indices_buf: int32, for as many pages as any batch has.
        paged_kv_last_page_len_buf: int32 [batch_size].
        custom_mask_buf: uint8, for the packed bits of any batch and 8 bytes more; needed, like
            qk_indptr_buf, where plan() is given a custom mask.
        qk_indptr_buf, mask_indptr_buf: int32 [batch_size + 1], two names of one buffer.
        backend: "auto", "fa2", "fa3", "cpu", or "cudnn": "auto" with cuDNN's forms of arguments,
            so that with seq_lens_q, also [batch_size, 1, 1, 1], qo_indptr may count elements, and
            a paged cache is then [pages, num_kv_heads, page_size, head_dim]. fa2, fa3 and cpu never
            become another, unless PREFLASH_BACKEND in the environment names the one to use.
        jit_args, jit_kwargs: None, or those of FlashInfer's variant "AttentionSink", whose dtypes
            and head_dims plan() must then have. Nothing is compiled at run time. run() takes sink
            and sm_scale by position behind the tensors, everything else by name.
        variant_owns_mask: False only.

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
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
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
            paged_kv_indptr_buf=paged_kv_indptr_buf, paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf, custom_mask_buf=custom_mask_buf,
            qk_indptr_buf=qk_indptr_buf, mask_indptr_buf=mask_indptr_buf,
        )  # fmt: skip
        if jit_args is not None:
            sink_variant.give_run(self, paged=True)

    @plans(PagedPlanArguments, **_ARRAYS)
    def plan(self, a: PagedPlanArguments) -> None:
        """Chooses a kernel and makes its work list for a batch of these lengths.

        Index arrays are int32, on the CPU or on the wrapper's device; those on the CPU cost no
        wait for the GPU, those on the GPU are copied back once. Page indices on the CPU are
        uploaded.

        Args:
            qo_indptr: [batch_size + 1], first token of each request in q. This and
                paged_kv_indptr may start anywhere.
            paged_kv_indptr: [batch_size + 1], first entry of each request in paged_kv_indices. A
                request has at most 2^30 keys.
            paged_kv_indices: at least [paged_kv_indptr[-1]], pages; or a block table [batch_size,
                max_pages], whose row i begins with the pages of request i, at any distance from
                row to row. On the GPU they are used in place and must stay as they are until the
                next plan().
            paged_kv_last_page_len: [batch_size], in [1, page_size]; that of a request without pages
                does not count: the request has no keys.
            num_qo_heads, num_kv_heads: the first is a multiple of the second.
            head_dim, head_dim_qk: of q and k, a multiple of 8 up to 512.
            head_dim_vo: of v and the output; head_dim by default.
            page_size: tokens per page, at least 1.
            custom_mask: every request's [qo_len, kv_len] flattened and concatenated, of a dtype as
                in single_prefill_with_kv_cache; of any shape, and longer than needed if you like.
            packed_custom_mask: the same in bits, every request starting on a byte
                (`segment_packbits(..., bitorder="little")`). Takes precedence over custom_mask.
            causal, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, rope_scale,
            rope_theta, allow_fp16_qk_reduction, use_fp16_qk_reduction, q_quantization: as in
            single_prefill_with_kv_cache.
            q_data_type, kv_data_type, o_data_type, o_dtype: dtypes of q, of k and v (q's by
                default), and of the output, as in single_prefill_with_kv_cache.
            non_blocking: either value promises the same: the arrays may change when plan()
                returns, run() may be called on any stream, and the host does not wait for the
                upload.
            batch_invariant: the bits of a request's rows depend on the request alone: not on the
                rest of the batch, on how its prompt was cut into chunks and decode steps, on CUDA
                graphs, page size or GPU model. docs/invariance.md has the exceptions, most of them
                on fa3. Without fixed_split_size it means disable_split_kv.
                PREFLASH_BATCH_INVARIANT=1 in the environment, read at import, sets it for every
                call.
            fixed_split_size: keys per KV chunk, rounded up to whole key tiles; implies
                batch_invariant. Partial results that exceed the float workspace take up to 64
                launches a run. None, 0 and -1 let the planner choose.
            disable_split_kv: never split keys, whatever fixed_split_size says; implies
                batch_invariant.
            seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv,
            uniform_q_len:
                repeat what the arrays say, and must agree with it. Tensors on the GPU are compared
                only with PREFLASH_DEBUG=1 in the environment, because it takes a wait.
            lengths_are_upper_bounds: True: the lengths of keys in paged_kv_indptr and
                paged_kv_last_page_len are upper bounds, and seq_lens, int32 [batch_size] on the
                wrapper's device, has the numbers of keys. Every run() and every replay of a CUDA
                graph reads it at its own time and clamps it to [0, bound]; no wait of the host.
                Rows of q are those of qo_indptr; a row without keys is 0 and -inf. The tensor must
                stay where it is. No custom mask.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr:
                multi-item scoring, several items behind one prefix, instead of another mask.
                [batch_size] integers, the tokens of each request's prefix; [batch_size *
                token_pos_in_items_len] integers, of each request's tokens behind its prefix, padded
                to token_pos_in_items_len with 0, which the last request may lack; [batch_size], no
                item is longer. A token of the prefix keeps what causal keeps. Another one keeps the
                prefix and, of position p, the last p tokens up to itself: p counts from 1 in every
                item, and is 0 at a delimiter. Made into a custom mask: plan() takes and writes
                sum(qo_len * kv_len) bytes on the wrapper's device, of which an eighth stays.

        Raises:
            TypeError, ValueError: an argument is wrong, or a workspace too small.
            NotImplementedError: no compiled kernel serves it, or newer FlashInfer releases alone.
            The wrapper keeps the plan it had.
        """
        super()._make_plan(a)

    @plans(PagedPlanArguments, **_ARRAYS)
    def begin_forward(self, a: PagedPlanArguments) -> None:
        """plan(), but made for what forward() last asked for: its causal, window_left, soft cap and
        position encoding replace these arguments where they differ, so that one plan serves both
        calls. run() still means these arguments, and plans for them if it has to."""
        super()._begin_forward(a)

    @takes(PagedPlanArguments)
    def workspace_size(self, a: PagedPlanArguments) -> tuple[int, int]:
        """(float_bytes, int_bytes) that plan() with these arguments uses at most. Plans nothing.
        A smaller float workspace makes fixed_split_size take several launches, which may use more
        int_bytes.

        With use_cuda_graph and fixed_split_size both grow with the float workspace, all of which
        is for longer keys of later plans: what these arguments need."""
        return super()._workspace_size(a)

    _by_position = ("k_scale", "v_scale", "return_lse")

    @by_position(*_by_position)
    @lists_options
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        *args: Any,
        k_scale: Scale = None,
        v_scale: Scale = None,
        q_scale: Scale = None,
        return_lse: bool = False,
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
            paged_kv_cache: one tensor [max_num_pages, 2, page_size, num_kv_heads, head_dim] (NHD)
                or [max_num_pages, 2, num_kv_heads, page_size, head_dim] (HND), or a tuple of two
                without the dimension of 2, which may be strided views of their own. At page_size 1
                the dimension of page_size may be left out.
            window_left: another window than the planned one; planned when first asked for.
            k_scale, v_scale, q_scale, return_lse, out, lse, lse_base, lse_layout, enable_pdl,
            scale_q, scale_k, scale_v, sinks, kv_cache_sf: as in single_prefill_with_kv_cache.
                The three scales may also follow the cache by position; a float is then that of all
                heads, q_scale, k_scale or v_scale.
            skip_softmax_threshold_scale_factor: as in trtllm_fmha_v2_prefill; planned when first
                asked for, for every factor at once. lse is that of the tiles that count. None or
                0: none is left out.
            o_scale, use_fp16_softmax, uses_spcompress: None, or 1.0, False and False, only.

        Returns:
            out [rows of q, num_qo_heads, head_dim_vo], or (out, lse) with return_lse. Rows of no
            request are 0 in an out that the call allocates, -inf in such an lse, and untouched in
            the caller's. The replay of a CUDA graph leaves rows as they are that a later, smaller
            plan() has no longer.

        Raises:
            TypeError, ValueError: not planned, or a tensor is not what was planned. Nothing is
            launched. NotImplementedError: an option of a later release.
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
            validate.one_cache(args)
            given = run_options(self, (args, q_scale, k_scale, v_scale, sinks), options)
            outputs = Outputs(out, lse, return_lse, lse_base, lse_layout)
            return super()._run(q, paged_kv_cache, given, outputs)
        outputs = run_outputs(out, lse, return_lse, lse_base, lse_layout)
        scales = (q_scale, k_scale, v_scale)
        return super()._run_quick(plan, variant, q, paged_kv_cache, scales, sinks, outputs)

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **options)

    @forwards(PagedForwardArguments)
    def forward(self, a: PagedForwardArguments) -> torch.Tensor:
        """Deprecated: run() with its own options; they replace those of plan(), defaults included.

        Where they differ from the plan, the variant is selected and planned again, once for all
        layers. A custom mask of plan() stays.
        """
        return super()._forward(a.q, a.paged_kv_cache, a, DEFAULT_OUTPUTS)

    @forwards(PagedForwardArguments)
    def forward_return_lse(self, a: PagedForwardArguments) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: forward() that returns (out, lse), lse base 2 and [tokens, num_qo_heads]."""
        return super()._forward(a.q, a.paged_kv_cache, a, Outputs(return_lse=True))


class Pages(BatchPrefillWithPagedKVCacheWrapper):
    """The paged wrapper inside of another one, which refuses backend="cudnn"."""

    _takes_cudnn = False


class OverPages:
    """Properties of a wrapper that plans and runs through a paged one."""

    _pages: Pages

    @property
    def device(self) -> torch.device:
        """Device of the workspace and of every tensor of run()."""
        return self._pages.device

    @property
    def variant(self) -> str | None:
        """The id of the kernel that plan() chose; None before."""
        return self._pages.variant

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pages!r})"
