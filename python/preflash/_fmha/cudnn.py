"""cudnn_batch_prefill_with_kv_cache on the kernels: converts its arguments to those of
trtllm_fmha_v2_prefill, and copies rows that its offsets place in another way."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch.nn.functional import pad

from .. import _core
from .._check import torch_modes, validate
from .._check.arguments import GivenScales
from .._check.rules import TENSORS
from .._check.scales import folded_scales
from .._check.tensors import refuse_shared
from .._device import backends
from .._device.stream import device_stream_of, sent
from .._device.workspace import check_buffer
from . import direct

_GPU = ("cuda",)
_ARRAYS = ("actual_seq_lens_q", "actual_seq_lens_kv", *(f"batch_offsets_{x}" for x in "qokv"))
_ARRAYS += ("batch_offsets_stats",)
NAMES = {
    **{"k": "k_cache", "v": "v_cache", "qkv": "q, k_cache, v_cache", "input_layout": "layout"},
    **{"seq_lens": "actual_seq_lens_kv", "max_kv_len": "max_sequence_kv", "bmm1_scale": "scale"},
}


def attend(a: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (out, lse or None). a: the arguments, by name."""
    backend = backends.requested("auto" if a.backend is None else a.backend, with_cudnn=True).name
    _check_tensors(a)
    validate.one_of("batch_offsets_units", a.batch_offsets_units, ("elements", "tokens"))
    validate.one_of("lse_base", a.lse_base, tuple(validate.LSE_SCALES))
    with_lse = validate.flag("return_lse", a.return_lse) or a.lse is not None
    _read_arrays(a)
    scale = validate.logits_scale("scale", validate.scale("scale", a.scale))
    scales = folded_scales(scale, GivenScales(a.q_scale, a.k_scale, a.v_scale), None)
    qo_lens = _lengths(a, "actual_seq_lens_q", "batch_offsets_q", "max_token_per_sequence")
    kv_lens = _lengths(a, "actual_seq_lens_kv", "batch_offsets_k", "max_sequence_kv")
    if len(kv_lens) != (size := len(qo_lens)):
        raise ValueError(f"actual_seq_lens_kv has {len(kv_lens)} elements; must have {size}")
    o_dtype = validate.output_dtype("o_data_type", a.o_data_type, a.q.dtype)
    lse_shape = (size, a.max_token_per_sequence, a.q.shape[1])
    _check_outputs(a, o_dtype, lse_shape)
    rows = math.prod((lse_shape if a.lse is None else a.lse.shape)[:-1])
    q_at = _starts(a, "q", qo_lens, a.q.stride(0), len(a.q))
    width = a.q.shape[1] * a.v_cache.shape[-1] if a.out is None else a.out.stride(0)
    out_at = _starts(a, "o", qo_lens, width, len(a.q))
    lse_at = _starts(a, "stats", qo_lens, a.q.shape[1], rows)
    begin = _begin(a, q_at, qo_lens)
    in_place = begin is not None and begin == _begin(a, out_at, qo_lens)
    q, first = a.q, begin or 0
    if begin is None:
        q = _taken(q, _rows(a, q_at, qo_lens, len(q)))
    layout, (k, v, kv_indptr) = "Q_PAGED_KV_HND", (a.k_cache, a.v_cache, None)
    if a.block_tables is None:
        layout, (k, v, kv_indptr) = "SEPARATE_Q_K_V", _side_by_side(a, kv_lens)
    computed = direct.attend(
        NAMES, {"workspace_buffer": a.workspace_buffer, "block_tables": a.block_tables},
        causal=validate.flag("causal", a.causal), qkv=(q, k, v), input_layout=layout,
        seq_lens=kv_lens.int(), max_q_len=a.max_token_per_sequence, max_kv_len=a.max_sequence_kv,
        bmm1_scale=scales.logits, bmm2_scale=scales.output, batch_size=size,
        cum_seq_lens_q=(pad(qo_lens.cumsum(0), (1, 0)) + first).int(), cum_seq_lens_kv=kv_indptr,
        out=a.out if in_place else None, out_dtype=o_dtype, lse=None, return_lse=with_lse,
        backend=backend,
    )  # fmt: skip
    out, lse = computed if with_lse else (computed, None)
    if not in_place:
        packed, out = out[first:], a.out
        if out is None:
            out = packed.new_zeros((*a.q.shape[:2], packed.shape[-1]))
        _put(out, _rows(a, out_at, qo_lens, len(packed)), packed)
    if lse is not None:
        packed, lse = lse[first:] * validate.LSE_SCALES[a.lse_base], a.lse
        if lse is None:
            lse = packed.new_empty(lse_shape)
        if a.lse is None or a.batch_offsets_stats is None:
            lse.fill_(-math.inf)
        _put(lse.view(-1, lse.shape[-1]), _rows(a, lse_at, qo_lens, len(packed)), packed)
    return out, lse if a.return_lse else None


def _check_tensors(a: SimpleNamespace) -> None:
    q = validate.conforms("q", a.q, "aligned_q")
    validate.query_dtype("q", q.dtype)
    rule = "dense_kv" if a.block_tables is None else "cudnn_pages"
    k, v = (
        validate.conforms(name, getattr(a, name), rule, q.device) for name in ("k_cache", "v_cache")
    )
    for name, value in (("k_cache", k), ("v_cache", v)):
        validate.kv_dtype(name, value.dtype, q.dtype)
    fits = k.shape[-1] == q.shape[2] and k.shape[1] == v.shape[1]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        row = TENSORS[rule]
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k_cache {tuple(k.shape)} and v_cache {tuple(v.shape)}; "
            f"must be [{', '.join(row.shape)}] {row.note}, k_cache of q's head_dim, with one "
            "number of heads that divides q's"
        )
    if a.block_tables is not None:  # pages have no offsets
        validate.absent(batch_offsets_k=a.batch_offsets_k, batch_offsets_v=a.batch_offsets_v)
    check_buffer("workspace_buffer", a.workspace_buffer, q.device)
    torch_modes.forward_only(q, k, v, out=a.out, lse=a.lse)


def _read_arrays(a: SimpleNamespace) -> None:
    """Converts lengths and offsets to one-dimensional int64 arrays on the CPU, or, with
    is_cuda_graph_compatible=True, on q's GPU."""
    of_graph = "with is_cuda_graph_compatible=True it must be"
    a.on_host = not validate.flag("is_cuda_graph_compatible", a.is_cuda_graph_compatible)
    a.on_host |= a.q.device.type not in _GPU
    if a.on_host and device_stream_of(a.q.device).is_capturing():
        raise RuntimeError(
            "this call reads lengths on the host, which it cannot while its stream is being "
            "captured into a CUDA graph: pass is_cuda_graph_compatible=True and arrays on the GPU"
        )
    for name in () if a.on_host else ("scale", "q_scale", "k_scale", "v_scale"):
        if getattr(getattr(a, name), "is_cuda", False):
            raise NotImplementedError(f"{name} is on the GPU; {of_graph} a float, which stays")
    for name in (*_ARRAYS, "block_tables"):
        if (value := getattr(a, name)) is None:
            continue
        if validate.tensor(name, value).device != a.q.device and not a.on_host:
            raise ValueError(f"{name} is on {value.device}; {of_graph} on the GPU, for replays")
        if name != "block_tables":
            if value.numel() == value.shape[:1].numel():
                value = value.reshape(-1)  # callers of cuDNN write [n, 1, 1, 1]
            validate.conforms(name, value, "wide_offsets", a.q.device)
            setattr(a, name, value.to("cpu" if a.on_host else a.q.device, torch.int64))


def _lengths(a: SimpleNamespace, name: str, offsets: str, bound: str) -> torch.Tensor:
    """[batch_size]: the lengths, or the differences of offsets in tokens."""
    value, longest = getattr(a, name), validate.size(bound, getattr(a, bound))
    if value is None:
        if getattr(a, offsets) is None or a.batch_offsets_units != "tokens":
            only = f"if {offsets} holds batch_size + 1 tokens (batch_offsets_units='tokens')"
            raise ValueError(f"{name} is missing; it may be left out only {only}")
        value = getattr(a, offsets).diff()
    for request, length in enumerate(value.tolist() if a.on_host or _core.debugging() else []):
        if not 0 <= length <= longest:
            raise ValueError(f"{name}[{request}] = {length}: must be in [0, {bound} = {longest}]")
    return value


def _check_outputs(a: SimpleNamespace, o_dtype: torch.dtype, lse_shape: tuple[int, ...]) -> None:
    q, read = a.q, ("k_cache", "v_cache", "workspace_buffer")
    if a.out is not None:
        dims = ("rows of q", "num_qo_heads", "head_dim_vo", "o_dtype")
        known = dict(zip(dims, (*q.shape[:2], a.v_cache.shape[-1], o_dtype), strict=True))
        validate.conforms("out", a.out, "", q.device, known)
    if a.lse is not None:
        packed = a.batch_offsets_stats is not None and validate.tensor("lse", a.lse).dim() == 2
        rule = "lse_packed" if packed else "lse_padded"
        dims = ("rows of q", "num_qo_heads", "batch_size", "max_token_per_sequence")
        known = dict(zip(dims, (*q.shape[:2], *lse_shape[:2]), strict=True))
        validate.conforms("lse", a.lse, rule, q.device, known)
    for name, others in (("out", read), ("lse", (*read, "q", "out"))):
        for other in others if getattr(a, name) is not None else ():
            if getattr(a, other) is not None:
                refuse_shared(name, getattr(a, name), other, getattr(a, other))


def _starts(
    a: SimpleNamespace, of: str, lens: torch.Tensor, width: int, tokens: int
) -> torch.Tensor:
    """[batch_size]: the first tokens of the requests in a tensor of so many tokens, which are
    `width` elements apart."""
    name, size, in_tokens = f"batch_offsets_{of}", len(lens), a.batch_offsets_units == "tokens"
    value = getattr(a, name)
    if value is None and in_tokens and of in "ov":  # tokens are those of q and k
        value = a.batch_offsets_q if of == "o" else a.batch_offsets_k
    if value is None and of == "stats":
        return torch.arange(size, device=lens.device) * a.max_token_per_sequence
    if value is None and size > 1:
        wanted = f"[batch_size + 1], where each begins, in {a.batch_offsets_units}"
        raise ValueError(f"{name} is missing; with more than one request it must be {wanted}")
    value = torch.zeros_like(lens) if value is None else value
    if len(value) not in (size, size + 1):
        wanted = f"batch_size + 1 = {size + 1} (or batch_size)"
        raise ValueError(f"{name} has {len(value)} elements; must have {wanted}")
    width = 1 if in_tokens else max(width, 1)
    if a.on_host or _core.debugging():
        _check_starts(name, value.tolist(), lens.tolist(), width, tokens)
    return (value // width)[:size]


def _check_starts(name: str, value: list[int], lens: list[int], width: int, tokens: int) -> None:
    begins = [begin // width for begin in value]
    requests = zip(begins, lens, [*begins[1:], 0], strict=False)  # with where the next one begins
    for request, (begin, length, after) in enumerate(requests):
        where = f"{name}[{request}]"
        if value[request] % width:
            raise ValueError(
                f"{where} = {value[request]}: must be a multiple of {width}, the elements from one "
                "token to the next; batch_offsets_units='tokens' takes tokens"
            )
        if length and not 0 <= begin <= tokens - length:
            has = f"request {request} would have the tokens [{begin}, {begin + length})"
            raise ValueError(f"{where}: {has}; there are {tokens}")
        if begin < after < begin + length:  # requests that share tokens begin at the same one
            has = f"request {request} has {length} tokens"
            raise ValueError(f"{where}: {has}, and the next one begins {after - begin} behind it")
    written = {"batch_offsets_o": "out", "batch_offsets_stats": "lse"}.get(name)
    used = sorted((begin, n) for begin, n in zip(begins, lens, strict=False) if n)
    if written and any(begin + n > following for (begin, n), (following, _) in pairwise(used)):
        raise ValueError(f"{name}: requests overlap in {written}, which is written")


def _begin(a: SimpleNamespace, starts: torch.Tensor, lens: torch.Tensor) -> int | None:
    """The first token, if requests lie one after the other; None if not, or if on a GPU."""
    if not a.on_host:
        return None
    begins = (starts + lens - lens.cumsum(0))[lens > 0].unique().tolist() or [0]
    return begins[0] if len(begins) == 1 else None


def _rows(a: SimpleNamespace, starts: torch.Tensor, lens: torch.Tensor, room: int) -> torch.Tensor:
    """Row of each token, one request after the other, where q is. With lengths on a GPU `room`
    rows, -1 for no token."""
    ends = lens.cumsum(0)
    room = int(lens.sum()) if a.on_host else room * (len(lens) > 0)
    slots = torch.arange(room, device=lens.device)
    request = torch.searchsorted(ends, slots, right=True).clamp(max=len(lens) - 1)
    rows = (starts + lens - ends)[request] + slots
    return sent(rows, a.q.device) if a.on_host else rows.masked_fill(slots >= ends[-1:], -1)


def _side_by_side(
    a: SimpleNamespace, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v with every request at the same tokens of both, and their int32 indptr."""
    k, v, indptr = a.k_cache, a.v_cache, pad(lens.cumsum(0), (1, 0))
    at = {"k": _starts(a, "k", lens, k.stride(0), len(k))}
    at["v"] = _starts(a, "v", lens, v.stride(0), len(v))
    if not a.on_host:
        indptr = indptr + at["k"][:1]
        for name, starts in at.items():
            direct.check_one_after_the_other(f"batch_offsets_{name}", starts, indptr, 1)
        used = min(len(k), len(v))
    elif (begin := _begin(a, at["k"], lens)) is None or begin != _begin(a, at["v"], lens):
        k, v = (_taken(x, _rows(a, at[name], lens, 0)) for name, x in (("k", k), ("v", v)))
        used = len(k)
    else:
        indptr = indptr + begin
        used = int(indptr[-1])
    return k[:used], v[:used], indptr.int()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch indexes: not every torch does 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns tensor[rows], with any row for -1."""
    return _bits(tensor)[rows.clamp(0, len(tensor) - 1)].view(tensor.dtype)


def _put(tensor: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Sets tensor[rows] = packed, without the rows of -1."""
    if len(rows) > 0 and (count := len(tensor)) > 0:
        slots = rows.new_full((count + 1,), -1)
        inside = rows.masked_fill((rows < 0) | (rows >= count), count)
        slots.scatter_(0, inside, torch.arange(len(rows), device=rows.device))
        owned = (slots[:count] >= 0).view(-1, *[1] * (tensor.dim() - 1))
        given = _bits(packed)[slots[:count].clamp(min=0)]
        _bits(tensor).copy_(torch.where(owned, given, _bits(tensor)))
