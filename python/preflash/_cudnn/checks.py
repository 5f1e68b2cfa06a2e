"""The checks of cudnn_batch_prefill_with_kv_cache: from its arguments to a call whose parts fit."""

from __future__ import annotations

from typing import Any

import torch

from .._check import values as check
from .._check.lengths import debugging
from .._check.tensors import reaches_into
from .._device import backends
from .._device.workspace import check_buffer
from .call import Call, CudnnArguments, Offsets

_UNITS = ("elements", "tokens")


def checked(a: CudnnArguments) -> Call:
    """Every check that needs no wait for the GPU."""
    backend = backends.requested("auto" if a.backend is None else a.backend, with_cudnn=True)
    _check_tensors(a)
    check.forward_only(a.q, a.k_cache, a.v_cache, out=a.out, lse=a.lse)
    check.one_of("batch_offsets_units", a.batch_offsets_units, _UNITS)
    check.one_of("lse_base", a.lse_base, tuple(check.LSE_SCALES))
    _check_factors(a)
    max_qo_len = check.integer("max_token_per_sequence", a.max_token_per_sequence, at_least=0)
    max_kv_len = check.integer("max_sequence_kv", a.max_sequence_kv, at_least=0)
    batch_size = _batch_size(a)
    kv_lens = _lengths(a, "actual_seq_lens_kv", "batch_offsets_k", batch_size)
    call = Call(
        q=a.q,
        k=a.k_cache,
        v=a.v_cache,
        sm_scale=check.logits_scale("scale", check.scale("scale", a.scale)),
        scales=a.scales,
        workspace=check_buffer("workspace_buffer", a.workspace_buffer, a.q.device),
        batch_size=batch_size,
        max_qo_len=max_qo_len,
        max_kv_len=max_kv_len,
        qo_lens=_lengths(a, "actual_seq_lens_q", "batch_offsets_q", batch_size),
        kv_lens=kv_lens,
        maybe_keyless=not kv_lens.is_cpu or bool((kv_lens == 0).any()),
        block_tables=_block_tables(a, kv_lens, max_kv_len),
        causal=check.flag("causal", a.causal),
        **_all_offsets(a, batch_size),
        out=a.out,
        lse=a.lse,
        return_lse=check.flag("return_lse", a.return_lse),
        lse_base=a.lse_base,
        o_dtype=check.output_dtype("o_data_type", a.o_data_type, a.q.dtype),
        capturable=check.flag("is_cuda_graph_compatible", a.is_cuda_graph_compatible),
        backend=backend,
    )
    _check_outputs(call)
    _check_host_values(call)
    _check_capturable(call)
    return call


def _check_tensors(a: CudnnArguments) -> None:
    device = check.tensor("q", a.q).device
    if a.q.dim() != 3:
        raise ValueError(
            f"q has shape {tuple(a.q.shape)}; must be [tokens, num_qo_heads, head_dim]"
        )
    check.query_dtype("q", a.q.dtype)
    paged = a.block_tables is not None
    shape = "[pages, num_kv_heads, page_size, head_dim] with block_tables"
    if not paged:
        shape = "[tokens, num_kv_heads, head_dim] without block_tables"
    for name, value in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        check.tensor(name, value)
        check.on_device(name, value, device)
        if value.dim() != (4 if paged else 3):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; must be {shape}")
        check.kv_dtype(name, value.dtype, a.q.dtype)
        check.rows(name, value)
    check.rows("q", a.q)
    k, v = a.k_cache, a.v_cache
    check.has_dtype("v_cache", v, k.dtype, "k_cache's")
    if v.shape[1] != k.shape[1] or (paged and v.shape[:3] != k.shape[:3]):
        raise ValueError(
            f"v_cache has shape {tuple(v.shape)} and k_cache {tuple(k.shape)}; must agree but for "
            "head_dim" + ("" if paged else " and tokens")
        )
    if k.shape[-1] != a.q.shape[-1]:
        raise ValueError(f"k_cache has head_dim {k.shape[-1]} and q {a.q.shape[-1]}; must be equal")
    heads = k.shape[1]
    if heads == 0 or a.q.shape[1] == 0 or a.q.shape[1] % heads:
        raise ValueError(
            f"q has {a.q.shape[1]} heads and k_cache {heads}; the first must be a multiple of the "
            f"second, in {shape}"
        )


def _batch_size(a: CudnnArguments) -> int:
    if a.actual_seq_lens_q is not None:
        return check.tensor("actual_seq_lens_q", a.actual_seq_lens_q).numel()
    if a.batch_offsets_units == "tokens" and a.batch_offsets_q is not None:
        return check.tensor("batch_offsets_q", a.batch_offsets_q).numel() - 1
    raise ValueError(
        "actual_seq_lens_q is missing; it may be left out only where batch_offsets_q of batch_size "
        "+ 1 elements tells it, with batch_offsets_units='tokens'"
    )


def _lengths(a: CudnnArguments, name: str, offsets: str, batch_size: int) -> torch.Tensor:
    """[batch_size]: given, or what the offsets of requests that lie side by side say."""
    given = getattr(a, name)
    if given is not None:
        value = _index_array(name, given, a.q.device)
        if value.numel() != batch_size:
            raise ValueError(
                f"{name} has {value.numel()} elements; must have batch_size = {batch_size}"
            )
        return value
    at = getattr(a, offsets)
    ragged = offsets == "batch_offsets_q" or a.block_tables is None
    if at is None or a.batch_offsets_units != "tokens" or not ragged:
        raise ValueError(
            f"{name} is missing; it may be left out only where {offsets} of batch_size + 1 "
            "elements tells it, with batch_offsets_units='tokens'"
            + ("" if ragged else " and without block_tables")
        )
    at = _index_array(offsets, at, a.q.device)
    if at.numel() != batch_size + 1:
        raise ValueError(
            f"{offsets} has {at.numel()} elements; without {name} it must have batch_size + 1 = "
            f"{batch_size + 1}"
        )
    return at.diff()


def _index_array(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """One-dimensional; callers of cuDNN write [n, 1, 1, 1], too."""
    value = check.tensor(name, value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {value.dtype}; must be torch.int32 or torch.int64")
    if value.dim() == 0 or value.numel() != value.shape[0]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; must be one-dimensional, or [n, 1, 1, 1]"
        )
    if not value.is_cpu and value.device != device:
        raise ValueError(f"{name} is on {value.device}; must be on the CPU or on {device}")
    return value.reshape(-1)


def _block_tables(a: CudnnArguments, kv_lens: torch.Tensor, max_kv_len: int) -> torch.Tensor | None:
    """As wide as the lengths need, or as their bound needs where the GPU has them."""
    if a.block_tables is None:
        return None
    table = check.tensor("block_tables", a.block_tables)
    check.has_dtype("block_tables", table, torch.int32, "page numbers")
    if not table.is_cpu and table.device != a.q.device:
        raise ValueError(f"block_tables is on {table.device}; must be on the CPU or on q's device")
    page_size = a.k_cache.shape[2]
    if page_size == 0:
        raise ValueError(f"k_cache has shape {tuple(a.k_cache.shape)}; page_size must be positive")
    longest, what = max_kv_len, "max_sequence_kv"
    if _readable(kv_lens) and int(kv_lens.max()) <= max_kv_len:
        longest, what = int(kv_lens.max()), "the longest of actual_seq_lens_kv"
    pages, batch_size = -(-longest // page_size), kv_lens.numel()
    if table.dim() != 2 or table.shape[0] != batch_size or table.shape[1] < pages:
        raise ValueError(
            f"block_tables has shape {tuple(table.shape)}; must be [batch_size, pages] = "
            f"[{batch_size}, at least {pages}]: {what} is {longest}, in pages of {page_size}"
        )
    return table


def _all_offsets(a: CudnnArguments, batch_size: int) -> dict[str, Offsets | None]:
    in_tokens = a.batch_offsets_units == "tokens"
    offsets_o, offsets_v = a.batch_offsets_o, a.batch_offsets_v
    if in_tokens:  # the same for both: tokens have no width
        offsets_o = a.batch_offsets_q if offsets_o is None else offsets_o
        offsets_v = a.batch_offsets_k if offsets_v is None else offsets_v
    out_width = a.q.shape[1] * a.v_cache.shape[-1]
    if a.out is not None and check.tensor("out", a.out).dim() == 3:
        out_width = a.out.stride(0)
    ragged = {
        "q_at": ("batch_offsets_q", a.batch_offsets_q, a.q.stride(0)),
        "out_at": ("batch_offsets_o", offsets_o, out_width),
        "k_at": ("batch_offsets_k", a.batch_offsets_k, a.k_cache.stride(0)),
        "v_at": ("batch_offsets_v", offsets_v, a.v_cache.stride(0)),
    }
    paged = a.block_tables is not None
    found: dict[str, Offsets | None] = {}
    for field, (name, given, width) in ragged.items():
        if paged and field in ("k_at", "v_at"):
            if given is not None:
                raise ValueError(f"{name}: pages have no offsets; leave it None with block_tables")
        elif given is None and batch_size > 1:
            raise ValueError(
                f"{name} is missing; with more than one request it says where each begins, in "
                f"{a.batch_offsets_units}: [batch_size + 1], the cumulated lengths"
                + ("" if in_tokens else " times heads times head_dim")
            )
        found[field] = _offsets(a, Offsets(name, given, width, in_tokens), batch_size)
    stats = a.batch_offsets_stats
    found["stats_at"] = None
    if stats is not None:
        stats_at = Offsets("batch_offsets_stats", stats, a.q.shape[1], in_tokens)
        found["stats_at"] = _offsets(a, stats_at, batch_size)
    return found


def _offsets(a: CudnnArguments, offsets: Offsets, batch_size: int) -> Offsets:
    if offsets.given is None:
        return offsets
    given = _index_array(offsets.name, offsets.given, a.q.device)
    if given.numel() not in (batch_size, batch_size + 1):
        raise ValueError(
            f"{offsets.name} has {given.numel()} elements; must have batch_size + 1 = "
            f"{batch_size + 1} (or batch_size)"
        )
    # One token may have any stride; then it is of no token after it.
    return offsets._replace(given=given, per_token=max(offsets.per_token, 1))


def _check_outputs(call: Call) -> None:
    device = call.q.device
    if call.out is not None:
        check.tensor("out", call.out)
        check.has_shape("out", call.out, call.out_shape, "[rows of q, num_qo_heads, head_dim_vo]")
        check.has_dtype(
            "out", call.out, call.o_dtype, "o_data_type, which is q's dtype but for fp8"
        )
        check.on_device("out", call.out, device)
        check.rows("out", call.out)
        check.not_overlapping("out", call.out)
    lse = call.lse
    if lse is None:
        return
    check.tensor("lse", lse)
    check.has_dtype("lse", lse, torch.float32, "the log-sum-exp is always float32")
    check.on_device("lse", lse, device)
    shapes = [call.lse_shape]
    if call.stats_at is not None:
        shapes.append((call.q.shape[0], call.q.shape[1]))
    if tuple(lse.shape) not in shapes:
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}; must be [batch_size, max_token_per_sequence, "
            f"num_qo_heads] = {call.lse_shape}"
            + ("" if call.stats_at is None else f", or {shapes[1]} with batch_offsets_stats")
        )
    if not lse.is_contiguous():
        raise ValueError(f"lse has strides {tuple(lse.stride())}; must be contiguous")
    if call.out is not None and reaches_into(lse, call.out):
        raise ValueError("lse shares memory with out: give lse memory of its own")


def _check_host_values(call: Call) -> None:
    """Lengths, offsets and pages that can be read without a wait."""
    for name, lens, longest, bound in (
        ("actual_seq_lens_q", call.qo_lens, call.max_qo_len, "max_token_per_sequence"),
        ("actual_seq_lens_kv", call.kv_lens, call.max_kv_len, "max_sequence_kv"),
    ):
        if not _readable(lens):
            continue
        for request, length in enumerate(lens.tolist()):
            if not 0 <= length <= longest:
                raise ValueError(
                    f"{name}[{request}] = {length}: must be in [0, {bound}] = [0, {longest}]"
                )
    places = [
        (call.q_at, call.qo_lens, call.q.shape[0], None),
        (call.out_at, call.qo_lens, call.q.shape[0], "out"),
    ]
    if call.stats_at is not None:
        places.append((call.stats_at, call.qo_lens, call.stats_rows, "lse"))
    if call.block_tables is None:
        places.append((call.k_at, call.kv_lens, call.k.shape[0], None))
        places.append((call.v_at, call.kv_lens, call.v.shape[0], None))
    for at, lens, tokens, written in places:
        if _readable(lens) and (at.given is None or _readable(at.given)):
            at.check(lens.tolist(), tokens, written=written)
    if call.block_tables is not None and _readable(call.block_tables) and _readable(call.kv_lens):
        _check_pages(call)


def _readable(array: torch.Tensor) -> bool:
    return array.numel() > 0 and (array.is_cpu or debugging())


def _check_pages(call: Call) -> None:
    """Those of requests; what lies behind them in the table is not followed."""
    table, lens = call.block_tables.cpu(), call.kv_lens.cpu()
    count, page_size = call.k.shape[0], call.k.shape[2]
    columns = torch.arange(table.shape[1], device="cpu")
    used = columns < ((lens + (page_size - 1)) // page_size)[:, None]
    wrong = used & ((table < 0) | (table >= count))
    if bool(wrong.any()):
        request, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{request}, {column}] = {int(table[request, column])}: must be in "
            f"[0, {count}), the pages of k_cache"
        )


def _check_capturable(call: Call) -> None:
    """A graph reads lengths when it is replayed, so they must be where it reads."""
    if not call.capturable or call.q.device.type != "cuda":
        return
    for name, value in call.arrays().items():
        if value.is_cpu:
            raise ValueError(
                f"{name} is on the CPU; with is_cuda_graph_compatible=True it must be on "
                f"{call.q.device}, where a replay reads it"
            )


def _check_factors(a: CudnnArguments) -> None:
    """A factor becomes part of the graph, and reading it waits."""
    given = {"scale": a.scale, "q_scale": a.scales.q_scale, "k_scale": a.scales.k_scale}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.is_cuda and a.is_cuda_graph_compatible:
            raise NotImplementedError(
                f"{name} is on {value.device}; with is_cuda_graph_compatible=True it must be a "
                "float, which becomes part of the graph"
            )
