"""A call of attention in one form, for cuDNN, the batch wrappers and the kernels that replace
cuDNN; and the checks that bring cudnn_batch_prefill_with_kv_cache into it. Its arrays may be on the
GPU, where only cuDNN reads them without a wait."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .._check import values as check
from .._check.arguments import GivenScales
from .._check.pages import may_be_read
from .._check.tensors import reaches_into
from .._device.workspace import check_buffer

_UNITS = ("elements", "tokens")


class Starts(NamedTuple):
    """Where the requests begin in one tensor."""

    name: str  # of the argument
    given: torch.Tensor | None  # [batch_size] or [batch_size + 1]; None: the one request, at 0
    in_tokens: bool  # the unit of `given`; False: elements


class Batch(NamedTuple):
    """The requests of a call."""

    size: int
    max_qo_len: int
    max_kv_len: int
    qo_lens: torch.Tensor  # [size]
    kv_lens: torch.Tensor  # [size]
    maybe_keyless: bool  # whether some request may have no keys
    block_tables: torch.Tensor | None  # [size, pages of the longest]
    # Of q, out, k and v (None: in pages), and of the log-sum-exp (None: padded to max_qo_len).
    starts: dict[str, Starts | None]
    rows: slice = slice(0)  # of q, that requests have, where the host knows their lengths

    def arrays(self) -> dict[str, torch.Tensor]:
        """Those that say how long requests are and where they lie, by name."""
        named = {at.name: at.given for at in self.starts.values() if at is not None}
        named |= {"actual_seq_lens_q": self.qo_lens, "actual_seq_lens_kv": self.kv_lens}
        named["block_tables"] = self.block_tables
        return {name: value for name, value in named.items() if value is not None}


class Call(NamedTuple):
    """Arguments that fit together as far as shapes say."""

    q: torch.Tensor  # [tokens, num_qo_heads, head_dim_qk]
    k: torch.Tensor  # [pages, num_kv_heads, page_size, head_dim_qk], or [tokens, num_kv_heads, ...]
    v: torch.Tensor
    out: torch.Tensor | None
    lse: torch.Tensor | None  # lse_shape, or [rows, num_qo_heads] where it has starts
    batch: Batch
    workspace: torch.Tensor
    sm_scale: float
    causal: bool
    o_dtype: torch.dtype
    lse_base: str
    lse_shape: tuple[int, ...]  # of one that is made
    return_lse: bool
    scales: GivenScales = GivenScales()
    capturable: bool = False

    @property
    def with_lse(self) -> bool:
        return self.return_lse or self.lse is not None

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.q.shape[0], self.q.shape[1], self.v.shape[-1])

    def per_token(self, name: str) -> int:
        """Elements of q, out, k, v or stats from one token to the next."""
        if name == "stats":
            return self.q.shape[1]
        if name == "out" and self.out is None:
            return self.q.shape[1] * self.v.shape[-1]
        return getattr(self, name).stride(0)

    def first_tokens(self, name: str, lengths: list[int]) -> list[int]:
        """Where the requests of these lengths begin in q, out, k, v or stats. Waits for a GPU that
        holds the offsets.

        Raises ValueError where they do not lie in it, reach into the next one, or share tokens of a
        tensor that is written."""
        at, width, size = self.batch.starts[name], max(self.per_token(name), 1), len(lengths)
        begins = [0] * size if at.given is None else at.given.tolist()
        if not at.in_tokens:
            for request, start in enumerate(begins[:size]):
                if start % width:
                    raise ValueError(
                        f"{at.name}[{request}] = {start}: must be a multiple of {width}, the "
                        "elements from one token to the next; batch_offsets_units='tokens' takes "
                        "tokens"
                    )
            begins = [start // width for start in begins]
        if name == "stats":
            tokens = math.prod((self.lse_shape if self.lse is None else self.lse.shape)[:-1])
        else:
            tokens = (self.q if name == "out" else getattr(self, name)).shape[0]
        for request, (start, length) in enumerate(zip(begins, lengths, strict=False)):
            if length and not 0 <= start <= tokens - length:
                raise ValueError(
                    f"{at.name}[{request}]: request {request} would have the tokens [{start}, "
                    f"{start + length}); there are {tokens}"
                )
            # Requests that share their tokens begin at the same one.
            if request + 1 < len(begins) and start < begins[request + 1] < start + length:
                raise ValueError(
                    f"{at.name}[{request}]: request {request} has {length} tokens, and the next "
                    f"one begins {begins[request + 1] - start} behind it"
                )
        written = {"out": "out", "stats": "lse"}.get(name)
        if written is not None:
            used = sorted((start, n) for start, n in zip(begins, lengths, strict=False) if n)
            if any(start + n > following for (start, n), (following, _) in pairwise(used)):
                raise ValueError(f"{at.name}: requests overlap in {written}, which is written")
        return begins[:size]


def checked(a: SimpleNamespace) -> Call:
    """Every check that needs no wait for the GPU. a: the arguments, by name."""
    _check_tensors(a)
    check.forward_only(a.q, a.k_cache, a.v_cache, out=a.out, lse=a.lse)
    check.one_of("batch_offsets_units", a.batch_offsets_units, _UNITS)
    check.one_of("lse_base", a.lse_base, tuple(check.LSE_SCALES))
    _check_factors(a)
    batch = _batch(a)
    call = Call(
        q=a.q,
        k=a.k_cache,
        v=a.v_cache,
        out=a.out,
        lse=a.lse,
        batch=batch,
        workspace=check_buffer("workspace_buffer", a.workspace_buffer, a.q.device),
        sm_scale=check.logits_scale("scale", check.scale("scale", a.scale)),
        causal=check.flag("causal", a.causal),
        o_dtype=check.output_dtype("o_data_type", a.o_data_type, a.q.dtype),
        lse_base=a.lse_base,
        lse_shape=(batch.size, batch.max_qo_len, a.q.shape[1]),
        return_lse=check.flag("return_lse", a.return_lse),
        scales=GivenScales(a.q_scale, a.k_scale, a.v_scale),
        capturable=check.flag("is_cuda_graph_compatible", a.is_cuda_graph_compatible),
    )
    _check_outputs(call)
    _check_host_values(call)
    if call.capturable and a.q.is_cuda:
        refuse_host_arrays(call, "with is_cuda_graph_compatible=True")
    return call


def refuse_host_arrays(call: Call, when: str) -> None:
    """A graph reads lengths when it is replayed, so they must be where it reads."""
    for name, value in call.batch.arrays().items():
        if value.is_cpu:
            raise ValueError(
                f"{name} is on the CPU; {when} it must be on {call.q.device}, where a replay reads "
                "it"
            )


def _check_tensors(a: SimpleNamespace) -> None:
    q, k, v = check.tensor("q", a.q), a.k_cache, a.v_cache
    check.has_dims("q", q, 3, "[tokens, num_qo_heads, head_dim]")
    check.query_dtype("q", q.dtype)
    paged = a.block_tables is not None
    shape = "[pages, num_kv_heads, page_size, head_dim] with block_tables"
    if not paged:
        shape = "[tokens, num_kv_heads, head_dim] without block_tables"
    for name, value in (("k_cache", k), ("v_cache", v)):
        check.tensor(name, value)
        check.on_device(name, value, q.device)
        check.has_dims(name, value, 4 if paged else 3, shape)
        check.kv_dtype(name, value.dtype, q.dtype)
        check.rows(name, value)
    check.rows("q", q)
    check.has_dtype("v_cache", v, k.dtype, "k_cache's")
    if v.shape[1] != k.shape[1] or (paged and v.shape[:3] != k.shape[:3]):
        raise ValueError(
            f"v_cache has shape {tuple(v.shape)} and k_cache {tuple(k.shape)}; must agree but for "
            "head_dim" + ("" if paged else " and tokens")
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k_cache has head_dim {k.shape[-1]} and q {q.shape[-1]}; must be equal")
    heads = k.shape[1]
    if heads == 0 or q.shape[1] == 0 or q.shape[1] % heads:
        raise ValueError(
            f"q has {q.shape[1]} heads and k_cache {heads}; the first must be a multiple of the "
            f"second, in {shape}"
        )


def _check_factors(a: SimpleNamespace) -> None:
    """A factor becomes part of the graph, and reading it waits."""
    for name in ("scale", "q_scale", "k_scale"):
        value = getattr(a, name)
        if isinstance(value, torch.Tensor) and value.is_cuda and a.is_cuda_graph_compatible:
            raise NotImplementedError(
                f"{name} is on {value.device}; with is_cuda_graph_compatible=True it must be a "
                "float, which becomes part of the graph"
            )


def _batch(a: SimpleNamespace) -> Batch:
    max_qo_len = check.integer("max_token_per_sequence", a.max_token_per_sequence, at_least=0)
    max_kv_len = check.integer("max_sequence_kv", a.max_sequence_kv, at_least=0)
    qo_lens = _lengths(a, "actual_seq_lens_q", "batch_offsets_q")
    size = qo_lens.numel()
    kv_lens = _lengths(a, "actual_seq_lens_kv", "batch_offsets_k", size)
    return Batch(
        size=size,
        max_qo_len=max_qo_len,
        max_kv_len=max_kv_len,
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        maybe_keyless=not kv_lens.is_cpu or bool((kv_lens == 0).any()),
        block_tables=_block_tables(a, kv_lens, max_kv_len),
        starts={name: _starts(a, name, size) for name in ("q", "out", "k", "v", "stats")},
    )


def _lengths(
    a: SimpleNamespace, name: str, offsets: str, batch_size: int | None = None
) -> torch.Tensor:
    """[batch_size]: given, or what the offsets of requests that lie side by side say."""
    source, told = name, getattr(a, name) is None
    if told:
        paged = offsets == "batch_offsets_k" and a.block_tables is not None
        if getattr(a, offsets) is None or a.batch_offsets_units != "tokens" or paged:
            raise ValueError(
                f"{name} is missing; it may be left out only where {offsets} of batch_size + 1 "
                "elements tells it, with batch_offsets_units='tokens'"
                + (" and without block_tables" if paged else "")
            )
        source = offsets
    value = _index_array(a, source, getattr(a, source))
    if batch_size is not None and value.numel() != batch_size + told:
        raise ValueError(
            f"{source} has {value.numel()} elements; must have "
            + (f"batch_size + 1 = {batch_size + 1}" if told else f"batch_size = {batch_size}")
        )
    return value.diff() if told else value


def _index_array(a: SimpleNamespace, name: str, value: Any) -> torch.Tensor:
    value = check.tensor(name, value)
    if value.dim() > 1 and value.numel() == value.shape[0]:
        value = value.reshape(-1)  # callers of cuDNN write [n, 1, 1, 1]
    return check.index_array(name, value, a.q.device, (torch.int32, torch.int64))


def _block_tables(
    a: SimpleNamespace, kv_lens: torch.Tensor, max_kv_len: int
) -> torch.Tensor | None:
    """As wide as the lengths need, or as their bound needs where the GPU has them."""
    if a.block_tables is None:
        return None
    page_size = a.k_cache.shape[2]
    if page_size == 0:
        raise ValueError(f"k_cache has shape {tuple(a.k_cache.shape)}; page_size must be positive")
    longest, what = max_kv_len, "max_sequence_kv"
    if _readable(kv_lens) and int(kv_lens.max()) <= max_kv_len:
        longest, what = int(kv_lens.max()), "the longest of actual_seq_lens_kv"
    shape = (kv_lens.numel(), -(-longest // page_size))
    why = f": {what} is {longest}, in pages of {page_size}"
    return check.page_table("block_tables", a.block_tables, shape, a.q.device, why)


def _starts(a: SimpleNamespace, tensor: str, batch_size: int) -> Starts | None:
    name = "batch_offsets_" + (tensor if tensor == "stats" else tensor[0])
    value, in_tokens = getattr(a, name), a.batch_offsets_units == "tokens"
    if value is None and in_tokens and tensor in ("out", "v"):  # tokens have no width
        value = a.batch_offsets_q if tensor == "out" else a.batch_offsets_k
    if tensor in "kv" and a.block_tables is not None:
        if value is not None:
            raise ValueError(f"{name}: pages have no offsets; leave it None with block_tables")
        return None
    if value is not None:
        value = _index_array(a, name, value)
        if value.numel() not in (batch_size, batch_size + 1):
            raise ValueError(
                f"{name} has {value.numel()} elements; must have batch_size + 1 = "
                f"{batch_size + 1} (or batch_size)"
            )
    elif tensor == "stats":
        return None
    elif batch_size > 1:
        raise ValueError(
            f"{name} is missing; with more than one request it says where each begins, in "
            f"{a.batch_offsets_units}: [batch_size + 1], the cumulated lengths"
            + ("" if in_tokens else " times heads times head_dim")
        )
    return Starts(name, value, in_tokens)


def _check_outputs(call: Call) -> None:
    device = call.q.device
    if call.out is not None:
        meaning = "[rows of q, num_qo_heads, head_dim_vo]"
        check.output(call.out, call.out_shape, meaning, call.o_dtype, device)
    lse = call.lse
    if lse is None:
        return
    check.tensor("lse", lse)
    check.has_dtype("lse", lse, torch.float32, check.WHY_FLOAT32)
    check.on_device("lse", lse, device)
    shapes = [call.lse_shape]
    if call.batch.starts["stats"] is not None:
        shapes.append((call.q.shape[0], call.q.shape[1]))
    if tuple(lse.shape) not in shapes:
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}; must be [batch_size, max_token_per_sequence, "
            f"num_qo_heads] = {call.lse_shape}"
            + (f", or {shapes[1]} with batch_offsets_stats" if shapes[1:] else "")
        )
    check.contiguous("lse", lse)
    if call.out is not None and reaches_into(lse, call.out):
        raise ValueError("lse shares memory with out: give lse memory of its own")


def _check_host_values(call: Call) -> None:
    """Lengths, offsets and pages that can be read without a wait."""
    batch = call.batch
    for name, lens, longest, bound in (
        ("actual_seq_lens_q", batch.qo_lens, batch.max_qo_len, "max_token_per_sequence"),
        ("actual_seq_lens_kv", batch.kv_lens, batch.max_kv_len, "max_sequence_kv"),
    ):
        for request, length in enumerate(lens.tolist() if _readable(lens) else []):
            if not 0 <= length <= longest:
                raise ValueError(
                    f"{name}[{request}] = {length}: must be in [0, {bound}] = [0, {longest}]"
                )
    for name, at in batch.starts.items():
        lens = batch.kv_lens if name in ("k", "v") else batch.qo_lens
        if at is not None and _readable(lens) and (at.given is None or _readable(at.given)):
            call.first_tokens(name, lens.tolist())
    table = batch.block_tables
    if table is not None and _readable(table) and _readable(batch.kv_lens):
        table, (count, _, page_size, _) = table.cpu(), call.k.shape
        # What lies behind the pages of a request is not followed.
        held = (batch.kv_lens.cpu() + (page_size - 1)) // page_size
        used = torch.arange(table.shape[1], device="cpu") < held[:, None]
        wrong = used & ((table < 0) | (table >= count))
        if bool(wrong.any()):
            request, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"block_tables[{request}, {column}] = {int(table[request, column])}: must be in "
                f"[0, {count}), the pages of k_cache"
            )


def _readable(array: torch.Tensor) -> bool:
    return array.numel() > 0 and may_be_read(array)
