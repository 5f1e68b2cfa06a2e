"""A checked call of cudnn_batch_prefill_with_kv_cache on cuDNN. The host reads nothing back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .. import _core
from .._check import values as check
from .._check.tensors import reaches_into
from .._device import backends
from .._device.stream import DeviceStream, sent
from . import graph as _graph
from .call import Call, Offsets
from .graph import Graph, Operands, Pages, Rows, Stats

HEAD_DIMS = ((128, 128), (192, 128))  # of q and k, of v
DTYPES = (torch.float16, torch.bfloat16)
DEVICE_TYPE = "cuda"


class RefusedError(Exception):
    """Why cuDNN does not serve a call; a sentence without an end."""


class SmallWorkspaceError(RefusedError):
    """The one reason that changes where the caller gives a workspace other memory."""

    def __init__(self, there: int, needed: int) -> None:
        super().__init__(f"workspace_buffer has {there} bytes and cuDNN needs {needed}")
        self.there = there


def why_not(
    device: torch.device,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dims: tuple[int, int],
) -> str | None:
    """What of a call no graph of cuDNN's takes, or None."""
    if device.type != DEVICE_TYPE:
        return f"cuDNN computes on CUDA tensors, and these are on {device}"
    missing = _graph.why_missing()
    if missing is not None:
        return missing
    if q_dtype not in DTYPES or kv_dtype != q_dtype:
        return (
            "it is served for float16 or bfloat16 in q, k and v alike, and they are "
            f"{q_dtype} and {kv_dtype}"
        )
    if head_dims not in HEAD_DIMS:
        return (
            "it is served for head_dim 128, or 192 for q and k with 128 for v, and they are "
            f"{head_dims[0]} and {head_dims[1]}"
        )
    return None


class Prepared(NamedTuple):
    """What calls share whose tensors differ in their addresses alone."""

    graph: _graph.BuiltGraph
    where: _Where


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and lse or None.

    Raises:
        RefusedError: cuDNN does not serve the call. Nothing was launched.
    """
    dtypes, head_dims = (call.q.dtype, call.k.dtype), (call.q.shape[2], call.v.shape[-1])
    refusal = why_not(call.q.device, *dtypes, head_dims) or _why_not_keys(call)
    if refusal is None and call.scales.v_scale is not None:
        refusal = "it has no factor of v, and v_scale is given"
    if refusal is not None:
        raise RefusedError(refusal)
    scale = call.sm_scale
    for name, value in (("q_scale", call.scales.q_scale), ("k_scale", call.scales.k_scale)):
        scale *= 1.0 if value is None else check.scale(name, value)
    check.logits_scale("scale * q_scale * k_scale", scale)
    if call.q.shape[0] == 0 or call.batch_size == 0 or call.max_qo_len == 0:
        return _nothing(call)
    call = call._replace(sm_scale=scale)
    return compute(call, prepare(call))


def prepare(call: Call) -> Prepared:
    """Everything but the launch. Raises RefusedError."""
    capturing = DeviceStream(call.q.device).is_capturing()
    _check_arrays(call, capturing)
    where = _Where(call)
    description = _describe(call, where)
    if capturing and not _graph.is_known(description):
        raise RuntimeError(
            "this call needs a graph of cuDNN's, which cannot be built while its stream is being "
            "captured into a CUDA graph: call it once before, with the same shapes, maxima and "
            "scale"
        )
    try:
        graph = _graph.built(description)
    except _graph.UnsupportedError as error:
        raise RefusedError(f"cuDNN has no kernel for it ({error})") from None
    check_workspace(call, graph)
    return Prepared(graph, where)


def check_workspace(call: Call, graph: _graph.BuiltGraph) -> None:
    """Raises SmallWorkspaceError. NOTE: the first run of a plan is not the only one to come here:
    a wrapper's workspace may be given other memory in between."""
    there = _core.bytes_of(check.TORCH, "workspace_buffer", call.workspace)
    if there < graph.workspace_bytes:
        raise SmallWorkspaceError(there, graph.workspace_bytes)


def compute(call: Call, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One launch, and what makes cuDNN's results those of the other kernels."""
    graph, where = prepared
    out = _prepared_out(call, where)
    stats = None
    if call.with_lse:
        shape = call.lse_shape if call.lse is None else call.lse.shape
        if call.stats_at is None:
            shape = (where.room.batch_size, where.room.max_qo_len, call.q.shape[1])
        stats = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    graph.run(Operands(call.q, call.k, call.v, out, stats, **where.arrays), call.workspace)
    check.written(call.out)
    lse = None if stats is None else _finished_lse(call, where, stats)
    return out, lse if call.return_lse else None


def _why_not_keys(call: Call) -> str | None:
    if call.k.numel() == 0 or call.max_kv_len == 0:
        return "there are no keys at all"
    if call.block_tables is None:
        return None
    page_size = call.k.shape[2]
    if page_size & (page_size - 1):
        return f"its pages have a power of two of tokens, and page_size is {page_size}"
    if call.backend.name != backends.CUDNN:
        return (
            "with pages its outputs are NaN where the rest of a request's last page holds NaN or "
            "infinity, so that it runs for backend='cudnn' alone"
        )
    return None


def _nothing(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result where no request has a query."""
    out = call.out
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.o_dtype, device=call.q.device)
    lse = call.lse
    if lse is None and call.return_lse:
        lse = torch.full(call.lse_shape, -math.inf, dtype=torch.float32, device=call.q.device)
    elif lse is not None and call.stats_at is None:
        lse.fill_(-math.inf)
    return out, lse if call.return_lse else None


def _check_arrays(call: Call, capturing: bool) -> None:
    if capturing:
        for name, value in call.arrays().items():
            if value.is_cpu:
                raise ValueError(
                    f"{name} is on the CPU; while a CUDA graph captures the call it must be on "
                    f"{call.q.device}, where a replay reads it"
                )
    check_apart(call)


def check_apart(call: Call) -> None:
    """Raises RefusedError where an output may be on an input."""
    if call.out is None and call.lse is None:
        return
    read = {"q": call.q, "k_cache": call.k, "v_cache": call.v, **call.arrays()}
    # What its shape promises behind the end of its storage is another tensor's by now.
    there = _core.bytes_of(check.TORCH, "workspace_buffer", call.workspace)
    if there == call.workspace.nbytes:
        read["workspace_buffer"] = call.workspace
    for name, written in (("out", call.out), ("lse", call.lse)):
        for other, value in read.items():
            # Other kernels tell interleaved tensors from overlapping ones, and refuse the latter.
            if written is not None and reaches_into(written, value):
                raise RefusedError(f"{name} and {other} are not apart in memory")


class _Where:
    """The arrays of a call as cuDNN reads them: on the device, offsets in elements.

    NOTE: wrappers keep it for as long as their plan, so it holds none of the call's tensors.
    """

    def __init__(self, call: Call) -> None:
        self._device = call.q.device
        self._batch_size = call.batch_size
        self.room = _room(call)
        self._causal, self._padded_stats = call.causal, call.stats_at is None
        paged = call.block_tables is not None
        self.arrays: dict[str, torch.Tensor | None] = {
            "qo_lens": self._lengths(call.qo_lens),
            "kv_lens": self._lengths(call.kv_lens),
            "q_offsets": self._offsets(call.q_at, call.qo_lens),
            "out_offsets": self._offsets(call.out_at, call.qo_lens),
            "k_offsets": None if paged else self._offsets(call.k_at, call.kv_lens),
            "v_offsets": None if paged else self._offsets(call.v_at, call.kv_lens),
            "stats_offsets": None,
            "page_table": self._page_table(call) if paged else None,
        }
        if call.stats_at is not None and call.with_lse:
            self.arrays["stats_offsets"] = self._offsets(call.stats_at, call.qo_lens)
        self._found: dict[str, _RowKinds] = {}

    def row_kinds(self, name: str, per_token: int, rows: int) -> _RowKinds:
        """Of the rows of `out` or `stats`, [rows] bool; padded stats: those that there is room for.

        Of what a wrapper has planned they are computed once, for all layers.
        """
        found = self._found.get(name)
        if found is None:
            found = self._of_requests()
            if name == "out" or not self._padded_stats:
                found = _kinds_at(found, self.arrays[f"{name}_offsets"], per_token, rows)
            self._found[name] = found
        return found

    def _of_requests(self) -> _RowKinds:
        """[batch_size, max_qo_len] of the room."""
        row = torch.arange(self.room.max_qo_len, device=self._device)
        qo_len, kv_len = self.arrays["qo_lens"][:, None], self.arrays["kv_lens"][:, None]
        owned = row < qo_len
        live = owned & (kv_len > 0)
        if self._causal:
            live = live & (row + kv_len >= qo_len)
        return _RowKinds(owned, live)

    def _sent(self, value: torch.Tensor) -> torch.Tensor:
        return (sent(value, self._device) if value.is_cpu else value).contiguous()

    def _lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        spare = self.room.batch_size - self._batch_size
        return self._sent(pad(lengths.to(torch.int32), (0, spare)) if spare else lengths.int())

    def _page_table(self, call: Call) -> torch.Tensor:
        """As wide as cuDNN wants it: the pages of the longest request that there is room for. What
        lies behind those of a request is not followed."""
        table = call.block_tables
        pages = -(-self.room.max_kv_len // call.k.shape[2])
        spare = (pages - table.shape[1], self.room.batch_size - self._batch_size)
        table = pad(table[:, :pages], (0, max(spare[0], 0), 0, spare[1]))
        return self._sent(table)

    def _offsets(self, at: Offsets, lengths: torch.Tensor) -> torch.Tensor:
        """Elements, in 64 bits where they are computed.

        The one request that needs none gets them, too: without offsets cuDNN writes all rows that
        a graph has room for, also behind the end of `out`.
        """
        given = at.given
        if given is None:
            given = torch.zeros(1, dtype=torch.int64, device=lengths.device)
        width = at.per_token
        if at.in_tokens:
            given = given.to(torch.int64) * width
        if given.numel() == self._batch_size:
            given = self._sent(given).to(torch.int64)
            end = given[-1:] + self._sent(lengths)[-1:] * width
            given = torch.cat([given, end])
        spare = self.room.batch_size - self._batch_size
        if spare:
            given = torch.cat([given, given[-1:].expand(spare)])
        return self._sent(given)


class _Room(NamedTuple):
    """What a graph is built for: powers of two, so that serving builds few of them. Requests that
    nobody has are of length 0."""

    batch_size: int
    max_qo_len: int
    max_kv_len: int


def _room(call: Call) -> _Room:
    max_qo_len = call.max_qo_len
    if call.with_lse and call.stats_at is not None:
        # In graphs of one row cuDNN writes statistics elsewhere than at the offsets.
        max_qo_len = max(max_qo_len, 2)
    sizes = (call.batch_size, max_qo_len, call.max_kv_len)
    return _Room(*(1 << (size - 1).bit_length() for size in sizes))


def _describe(call: Call, where: _Where) -> Graph:
    paged = call.block_tables is not None
    k, v = (_pages if paged else _rows)(call.k), (_pages if paged else _rows)(call.v)
    _, num_qo_heads, head_dim_vo = call.out_shape
    out = Rows(num_qo_heads * head_dim_vo, head_dim_vo) if call.out is None else _rows(call.out)
    stats = Stats.NONE
    if call.with_lse:
        stats = Stats.PADDED if call.stats_at is None else Stats.AT_OFFSETS
    names = ("q_offsets", "out_offsets", "k_offsets", "v_offsets", "stats_offsets")
    offsets = [where.arrays[name] for name in names]
    return Graph(
        device=call.q.device,
        dtype=call.q.dtype,
        **where.room._asdict(),
        num_qo_heads=num_qo_heads,
        num_kv_heads=call.k.shape[1],
        head_dim_qk=call.q.shape[2],
        head_dim_vo=head_dim_vo,
        scale=call.sm_scale,
        causal=call.causal,
        q=_rows(call.q),
        out=out,
        k=k,
        v=v,
        stats=stats,
        offsets=tuple(None if array is None else array.dtype for array in offsets),
        table_width=where.arrays["page_table"].shape[1] if paged else 0,
    )


def _rows(value: torch.Tensor) -> Rows:
    return Rows(token=value.stride(0), head=value.stride(1))


def _pages(pool: torch.Tensor) -> Pages:
    page, head, token, _ = pool.stride()
    return Pages(count=pool.shape[0], size=pool.shape[2], page=page, head=head, token=token)


class _RowKinds(NamedTuple):
    """Of each row, bool."""

    owned: torch.Tensor  # some request has it
    live: torch.Tensor  # and it keeps a key


def _kinds_at(
    kinds: _RowKinds, offsets: torch.Tensor | None, per_token: int, rows: int
) -> _RowKinds:
    """The same for the rows of a tensor where requests begin at offsets, [rows] bool."""
    owned = kinds.owned
    batch_size, max_qo_len = owned.shape
    at = torch.arange(max_qo_len, device=owned.device).expand(batch_size, -1)
    if offsets is not None:
        at = at + offsets[:batch_size, None].to(torch.int64) // per_token
    at = torch.where(owned, at, rows)  # one row more, for those that no request has
    kind = torch.zeros(rows + 1, dtype=torch.uint8, device=owned.device)
    kind.scatter_(0, at.reshape(-1), (owned.to(torch.uint8) + kinds.live).view(-1))
    return _RowKinds(kind[:rows] > 0, kind[:rows] > 1)


def _prepared_out(call: Call, where: _Where) -> torch.Tensor:
    """out, where the rows of requests without keys are 0: cuDNN does not write them."""
    if call.out is None:
        new = torch.zeros if call.maybe_keyless else torch.empty
        return new(call.out_shape, dtype=call.o_dtype, device=call.q.device)
    if call.maybe_keyless:
        kinds = where.row_kinds("out", call.out_at.per_token, call.out.shape[0])
        call.out.masked_fill_((kinds.owned & ~kinds.live)[:, None, None], 0.0)
    return call.out


def _finished_lse(call: Call, where: _Where, stats: torch.Tensor) -> torch.Tensor:
    """cuDNN's natural logarithms in the base asked for, and -inf where no key is kept."""
    if call.lse_base == "log2":
        stats *= 1.0 / math.log(2.0)
    heads = call.q.shape[1]
    kinds = where.row_kinds("stats", heads, stats.numel() // heads)
    if call.stats_at is None:
        used = (slice(call.batch_size), slice(call.max_qo_len))
        padded = torch.where(kinds.live[used][:, :, None], stats[used], -math.inf)
        return padded if call.lse is None else call.lse.copy_(padded)
    flat = stats.view(-1, heads)
    flat.masked_fill_(~kinds.live[:, None], -math.inf)
    if call.lse is None:
        return stats
    lse = call.lse.view(-1, heads)
    lse.copy_(torch.where(kinds.owned[:, None], flat, lse))
    return call.lse
