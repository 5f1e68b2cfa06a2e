"""Block-sparse attention: every block of query rows is a request whose keys are the pages that it
keeps, so that nothing that is left out is read or computed."""

# The API fixes long signatures; see prefill.py.

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from ._check import dtypes, torch_modes, validate
from ._check.arguments import Result
from ._check.names import renamed, tells_nearest
from ._check.tensors import refuse_shared
from ._wrappers.paged import OverPages, Pages

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]


# Names of plan()'s arguments here, by those of the paged wrapper's plan().
_NAMES = {
    "paged_kv_indptr": "indptr",
    "paged_kv_indices": "indices",
    "custom_mask": "mask",
    "packed_custom_mask": "packed_mask",
}


class _BlockSparse(OverPages):
    """Base of both wrappers: a paged wrapper whose pages are blocks of keys."""

    @tells_nearest
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._pages = Pages(float_workspace_buffer, backend=backend)
        self._causal = False

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces both workspaces, as in BatchPrefillWithPagedKVCacheWrapper."""
        self._pages.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def run_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run(q, k, v, *args, return_lse=True, **options)

    end_forward = Pages.end_forward


class BlockSparseAttentionWrapper(_BlockSparse):
    """Attention under a mask in BSR form, the same one for all heads.

    Args:
        float_workspace_buffer, backend: as in BatchPrefillWithPagedKVCacheWrapper, without "cudnn".

    Raises: TypeError, ValueError: an argument is wrong.
    """

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,  # noqa: N803, the API's
        N: int,  # noqa: N803
        R: int,  # noqa: N803
        C: int,  # noqa: N803
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: None = None,
        kv_block_lens: None = None,
        q2k_indices: None = None,
        q2k_num: None = None,
        kv_splits: None = None,
        use_clc: None = None,
        q_scale: None = None,
        k_scale: None = None,
        v_scale: None = None,
    ) -> None:
        """Plans for a matrix of M query rows and N keys, in blocks of R rows and C keys.

        Args:
            indptr: [ceil(M / R) + 1] integers, first entry of each row of blocks in indices.
            indices: [indptr[-1]] integers: the blocks of keys that a row of blocks keeps.
            M, N: rows of q, and of k and v. N is a multiple of C.
            R, C: rows and keys of a block; the last row of blocks may be shorter.
            mask: [number of blocks, R, C] bool: what is kept of each. Copied: sum(rows * keys) of
                the kept blocks, once a byte and then a bit for each.
            packed_mask: the bits of that, every row of blocks as [R, its blocks, C] and on a byte
                of its own (`segment_packbits`). Takes precedence over mask.
            causal: row r of a row of blocks keeps all of its keys but the last (rows - 1 - r):
                positions count among the keys that it keeps, which are aligned with its last row.
                Ignored with a mask.
            pos_encoding_mode: positions count as those of causal.
            use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta, q_data_type,
            kv_data_type, non_blocking: as in BatchPrefillWithPagedKVCacheWrapper.plan().
            o_data_type: of the output. One that q_data_type does not give is converted to.
            The others: None only; they are for kernels of SM100 and SM120.

        Raises as BatchPrefillWithPagedKVCacheWrapper.plan().
        """
        validate.absent(
            block_mask=block_mask, kv_block_lens=kv_block_lens, q2k_indices=q2k_indices,
            q2k_num=q2k_num, kv_splits=kv_splits, use_clc=use_clc, q_scale=q_scale,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        rows, keys = validate.size("M", M), validate.size("N", N)
        height, width = validate.size("R", R), validate.size("C", C)
        if keys % width:
            raise ValueError(f"N={keys}: must be a multiple of C = {width}")
        at = _on_host("indptr", indptr, "block_indices")
        blocks = _on_host("indices", indices, "block_indices")
        count = -(-rows // height)
        if at.numel() != count + 1:
            raise ValueError(
                f"indptr has {at.numel()} elements; must have ceil(M / R) + 1 = {count + 1}"
            )
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < keys // width:
            raise ValueError(
                f"indices holds {int(blocks.min())} to {int(blocks.max())}; must be in "
                f"[0, N / C) = [0, {keys // width})"
            )
        if mask is not None and packed_mask is None:
            mask = _by_rows(mask, at, (height, width))
        q_dtype = validate.dtype("q_data_type", q_data_type)
        o_dtype = validate.dtype("o_data_type", o_data_type)
        converts = o_dtype != q_dtype and q_dtype not in dtypes.FP8_DTYPES
        if converts and o_dtype not in dtypes.WIDE_DTYPES:
            raise TypeError(f"o_data_type is {o_dtype}; must be float16, bfloat16 or float32")
        qo_indptr = torch.arange(count + 1, dtype=torch.int32, device="cpu") * height
        with renamed(_NAMES):
            self._pages.plan(
                qo_indptr.clamp_(max=rows),
                at,
                blocks,
                torch.full((count,), width, dtype=torch.int32, device="cpu"),
                num_qo_heads, num_kv_heads, head_dim, width, mask, packed_mask, causal,
                pos_encoding_mode, use_fp16_qk_reduction, sm_scale, -1, logits_soft_cap, rope_scale,
                rope_theta, q_dtype, kv_data_type, non_blocking,
                o_data_type=None if converts else o_dtype,
            )  # fmt: skip
        self._keys, self._width = keys, width
        self._causal, self._o_dtype = causal, o_dtype if converts else None

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Attention under the planned mask.

        Args:
            q: [M, num_qo_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            out: [M, num_qo_heads, head_dim] to write into, of o_data_type.
            scale_q, scale_k, scale_v, lse, return_lse, enable_pdl: as in
            single_prefill_with_kv_cache.

        Returns:
            out, or (out, lse) with return_lse, lse base 2 and [M, num_qo_heads].

        Raises as BatchPrefillWithPagedKVCacheWrapper.run().
        """
        cache, into = self._in_blocks(k, v), out
        if self._o_dtype is not None:
            into, shape = None, tuple(validate.is_tensor("q", q).shape)
            _check_copied_into(
                {"k": k, "v": v},
                lse=(lse, torch.float32, [shape[:-1]]),
                out=(out, self._o_dtype, [shape]),
            )
        result = self._pages.run(
            q, cache, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, out=into, lse=lse,
            return_lse=return_lse, enable_pdl=enable_pdl,
        )  # fmt: skip
        return self._converted(result, out)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: None = None,
        scale_k: None = None,
        scale_v: None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Deprecated: run() with its own options, which replace those of plan(), defaults included.
        Factors of heads are run()'s alone."""
        validate.absent(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        result = self._pages.forward(
            q, self._in_blocks(k, v), self._causal, pos_encoding_mode, use_fp16_qk_reduction,
            None, None, -1, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        )  # fmt: skip
        return self._converted(result, None)

    def _in_blocks(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pages.variant is None:
            raise ValueError("run() before plan(): call plan() with the blocks first")
        for name, value in (("k", k), ("v", v)):
            validate.is_tensor(name, value)
            if value.dim() != 3 or value.shape[0] != self._keys:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; must be [N, num_kv_heads, head_dim] "
                    f"with N = {self._keys}"
                )
        blocks = (self._keys // self._width, self._width)
        return k.unflatten(0, blocks), v.unflatten(0, blocks)

    def _converted(self, result: Result, out: torch.Tensor | None) -> Result:
        """Converts the output to o_data_type, where the kernels write another dtype."""
        if self._o_dtype is None:
            return result
        computed = result[0] if isinstance(result, tuple) else result
        converted = computed.to(self._o_dtype) if out is None else out.copy_(computed)
        return (converted, result[1]) if isinstance(result, tuple) else converted


class VariableBlockSparseAttentionWrapper(_BlockSparse):
    """Attention under a mask of blocks of any sizes, another one for each KV head. The constructor
    is that of BlockSparseAttentionWrapper."""

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Plans for the blocks. All three arrays are read on the host: on a GPU that takes a wait.

        The list of keys has an entry for each key that a row of blocks keeps, of each KV head, or,
        where all column sizes have a common divisor, one for as many keys: on a GPU a multiple of
        8 is fetched fastest.

        Args:
            block_mask_map: [num_kv_heads, row blocks, column blocks] bool or integer.
            block_row_sz: [num_kv_heads, row blocks] integers, rows of each, the same sum for each
                head.
            block_col_sz: [num_kv_heads, column blocks] integers, keys of each, the same sum for
                each head.
            causal, pos_encoding_mode: as in BlockSparseAttentionWrapper.plan().
            The others, and the errors, are those of BatchPrefillWithPagedKVCacheWrapper.plan().
        """
        heads = validate.size("num_kv_heads", num_kv_heads)
        group, rest = divmod(validate.size("num_qo_heads", num_qo_heads), heads)
        if rest or not group:
            raise ValueError(
                f"num_qo_heads={num_qo_heads}: must be a multiple of num_kv_heads = {heads}"
            )
        known = {"num_kv_heads": heads}
        heights = _on_host("block_row_sz", block_row_sz, "block_sizes", known)
        widths = _on_host("block_col_sz", block_col_sz, "block_sizes", known)
        known |= {"row blocks": heights.shape[1], "column blocks": widths.shape[1]}
        kept = _on_host("block_mask_map", block_mask_map, "block_map", known) != 0
        rows = _same_sum("block_row_sz", heights, heads)
        keys = _same_sum("block_col_sz", widths, heads)
        # A page is the largest piece that every block of keys is made of.
        page = max(math.gcd(*widths.unique().tolist()), 1)
        counts = (widths // page).to(torch.int64)
        begins = counts.flatten().cumsum(0).view_as(counts) - counts
        head, _, column = kept.nonzero(as_tuple=True)
        lengths = counts[head, column]
        ends = lengths.cumsum(0)
        first = torch.repeat_interleave(begins[head, column] - (ends - lengths), lengths)
        pages = first + torch.arange(first.numel(), device="cpu")
        requests = heads * heights.shape[1]
        self._pages.plan(
            _indptr(heights.flatten()),
            _indptr((kept * counts[:, None]).sum(-1).flatten()),
            pages.to(torch.int32),
            torch.full((requests,), page, dtype=torch.int32, device="cpu"),
            group, 1, head_dim, page, None, None, causal, pos_encoding_mode, use_fp16_qk_reduction,
            sm_scale, -1, logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type,
            non_blocking,
        )  # fmt: skip
        self._heads, self._group, self._causal = heads, group, causal
        self._rows, self._keys, self._page = rows, keys, page

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Attention under the planned mask. With more than one query head for each KV head q and
        the outputs are copied, and so are k and v that are not contiguous.

        Args:
            q: [num_qo_heads, rows, head_dim].
            k, v: [num_kv_heads, keys, head_dim].
            out: to write into, of q's shape, or [num_kv_heads * rows, group, head_dim].
            lse: float32 to write into, [num_qo_heads, rows] or [num_kv_heads * rows, group].
            return_lse, enable_pdl: as in single_prefill_with_kv_cache.

        Returns:
            out [num_qo_heads, rows, head_dim], or (out, lse) with return_lse, lse base 2 and
            [num_qo_heads, rows].

        Raises as BatchPrefillWithPagedKVCacheWrapper.run().
        """
        by_head = tuple(validate.is_tensor("q", q).shape)
        q, cache = self._by_head(q, k, v)
        flat = tuple(q.shape)
        _check_copied_into(
            {"k": k, "v": v},
            lse=(lse, torch.float32, [by_head[:-1], flat[:-1]]),
            out=(out, q.dtype, [by_head, flat]),
        )
        wants_lse = return_lse or lse is not None
        result = self._pages.run(q, cache, return_lse=wants_lse, enable_pdl=enable_pdl)
        if not wants_lse:
            return self._placed(result, out)
        placed = self._placed(result[0], out), self._placed(result[1], lse)
        return placed if return_lse else placed[0]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Deprecated: run() with its own options, which replace those of plan(), defaults
        included."""
        q, cache = self._by_head(q, k, v)
        result = self._pages.forward(
            q, cache, self._causal, pos_encoding_mode, use_fp16_qk_reduction, None, None, -1,
            logits_soft_cap, sm_scale, rope_scale, rope_theta,
        )  # fmt: skip
        return self._placed(result, None)

    def _by_head(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """q as [num_kv_heads * rows, group, head_dim], k and v as pages of one head each."""
        if self._pages.variant is None:
            raise ValueError("run() before plan(): call plan() with the blocks first")
        for name, value, heads, tokens in (
            ("q", q, self._heads * self._group, self._rows),
            ("k", k, self._heads, self._keys),
            ("v", v, self._heads, self._keys),
        ):
            validate.is_tensor(name, value)
            if not torch_modes.traced():  # it may be copied
                validate.tensor(name, value)
            if value.dim() != 3 or tuple(value.shape[:2]) != (heads, tokens):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; must be [{heads}, {tokens}, head_dim]"
                )
        q = q.unflatten(0, (self._heads, self._group)).transpose(1, 2).flatten(0, 1)
        pages = self._heads * self._keys // self._page
        k, v = (x.reshape(pages, self._page, 1, x.shape[-1]) for x in (k, v))
        return q, (k, v)

    def _placed(self, computed: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """[num_kv_heads * rows, group, ...] as [num_qo_heads, rows, ...]."""
        by_head = computed.unflatten(0, (self._heads, self._rows)).transpose(1, 2).flatten(0, 1)
        if into is None:
            return by_head.contiguous()
        if into.shape == by_head.shape:
            return into.copy_(by_head)
        into.copy_(computed)
        return by_head.contiguous()


def _on_host(
    name: str, value: Any, rule: str, known: Mapping[str, int] = MappingProxyType({})
) -> torch.Tensor:
    """int32 (bool stays), contiguous, on the CPU."""
    value = validate.conforms(name, value, rule, known=known).cpu().contiguous()
    if value.dtype in (torch.bool, torch.int32):
        return value
    narrow = value.to(torch.int32)
    if not narrow.to(torch.int64).equal(value.to(torch.int64)):
        raise ValueError(f"{name} holds numbers beyond those of torch.int32")
    return narrow


def _check_copied_into(
    read: dict[str, torch.Tensor],
    **written: tuple[torch.Tensor | None, torch.dtype, list[tuple[int, ...]]],
) -> None:
    """Checks outputs that results are copied into; each with its dtype and its allowed shapes."""
    others = dict(read)
    for name, (value, dtype, shapes) in written.items():
        if value is None:
            continue
        shape = tuple(validate.is_tensor(name, value).shape)
        if shape not in shapes:
            raise ValueError(f"{name} has shape {shape}; must be {' or '.join(map(str, shapes))}")
        known = {"dtype of the result": dtype}
        validate.has_form(name, value, "copied_output", read["k"].device, known)
        if torch_modes.traced():
            continue
        validate.conforms(name, value, "copied_output")
        torch_modes.forward_only(**{name: value})
        for other, tensor in others.items():
            refuse_shared(name, value, other, tensor)
        others[name] = value


def _by_rows(mask: torch.Tensor, at: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Returns the [blocks, R, C] of every row of blocks as [R, blocks, C], flat. Rows after the
    last one of q are at the end, where plan() reads no mask."""
    height, width = block
    known = {"blocks": int(at[-1]), "R": height, "C": width}
    mask = validate.conforms("mask", mask, "block_masks", known=known)
    pieces = [
        mask[begin:end].transpose(0, 1).reshape(-1)
        for begin, end in pairwise(at.tolist())
        if end > begin
    ]
    return torch.cat(pieces) if pieces else mask.reshape(-1)


def _same_sum(name: str, sizes: torch.Tensor, heads: int) -> int:
    if sizes.shape[0] != heads:
        raise ValueError(f"{name} has shape {tuple(sizes.shape)}; must have num_kv_heads rows")
    if sizes.numel() and int(sizes.min()) < 0:
        raise ValueError(f"{name} holds {int(sizes.min())}; must not be negative")
    sums = sizes.sum(-1).tolist()
    if len(set(sums)) > 1:
        raise ValueError(f"{name} adds up to {sums}; must be the same for every KV head")
    return sums[0]


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
