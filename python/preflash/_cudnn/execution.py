"""Calls of cuDNN: its graphs, the arrays that these read, and corrections that make the results
equal to those of other kernels. The host reads nothing back."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from .. import _core
from .._check import values as check
from .._check.scales import folded_scales
from .._check.tensors import reaches_into
from .._device.stream import device_stream_of, sent
from . import graph as _graph
from .call import Call, refuse_host_arrays
from .graph import Described, Graph, RefusedError

HEAD_DIMS = ((128, 128), (192, 128))  # of q and k, of v
DTYPES = (torch.float16, torch.bfloat16)
DEVICE_TYPE = "cuda"

_KEPT = 64  # layouts of tensors that are prepared for


def refuse_unserved(
    device: torch.device,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dims: tuple[int, int],
) -> None:
    """Raises RefusedError for what no graph of cuDNN's takes."""
    if device.type != DEVICE_TYPE:
        raise RefusedError(f"cuDNN computes on CUDA tensors, and these are on {device}")
    if missing := _graph.why_missing():
        raise RefusedError(missing)
    if q_dtype not in DTYPES or kv_dtype != q_dtype:
        raise RefusedError(
            "it is served for float16 or bfloat16 in q, k and v alike, and they are "
            f"{q_dtype} and {kv_dtype}"
        )
    if head_dims not in HEAD_DIMS:
        raise RefusedError(
            "it is served for head_dim 128, or 192 for q and k with 128 for v, and they are "
            f"{head_dims[0]} and {head_dims[1]}"
        )


def attend(call: Call, *, explicit: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of one call, and lse or None. explicit: it asks for cuDNN and nothing else.

    Raises:
        RefusedError: cuDNN does not serve the call. Nothing was launched.
    """
    q, k = call.q, call.k
    refuse_unserved(q.device, q.dtype, k.dtype, (q.shape[2], call.v.shape[-1]))
    if k.numel() == 0 or call.batch.max_kv_len == 0:
        raise RefusedError("there are no keys at all")
    paged, page_size = call.batch.block_tables is not None, k.shape[-2]
    if paged and page_size & (page_size - 1):
        raise RefusedError(f"its pages have a power of two of tokens, and page_size is {page_size}")
    if paged and not explicit:
        raise RefusedError(
            "with pages its outputs are NaN where the rest of a request's last page holds NaN or "
            "infinity, so that it runs for backend='cudnn' alone"
        )
    if call.scales.v_scale is not None:
        raise RefusedError("it has no factor of v, and v_scale is given")
    scale = folded_scales(call.sm_scale, call.scales, None).logits
    return Attention(call.workspace, "workspace_buffer").of(call._replace(sm_scale=scale))


class Attention:
    """Of one batch, for any layers. What is made for tensors is kept for others that differ in
    their addresses alone."""

    def __init__(self, workspace: torch.Tensor, workspace_name: str) -> None:
        self._name = workspace_name
        self._bytes = workspace.nbytes
        self._kept: dict[tuple, _Prepared] = {}
        self._captured: list[_Prepared] = []  # what CUDA graphs replay: they read its arrays

    def forget(self) -> None:
        """All but what CUDA graphs replay."""
        self._kept.clear()

    def of(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result, and lse or None. Raises RefusedError."""
        batch, q, k = call.batch, call.q, call.k
        if 0 in (q.shape[0], batch.size, batch.max_qo_len, batch.max_kv_len, k.numel()):
            return _without_launch(call)
        capturing = device_stream_of(q.device).is_capturing()
        if capturing:
            refuse_host_arrays(call, "while a CUDA graph captures the call")
        there = _core.bytes_of(check.TORCH, self._name, call.workspace)
        _refuse_shared(call, there)
        given = (q, k, call.v, call.out)
        layout = tuple(None if t is None else (t.shape, t.stride()) for t in given)
        key = (layout, call.with_lse, call.sm_scale)
        prepared = self._kept.get(key) or _Prepared(call)
        needed = prepared.graph.workspace_bytes
        if there < needed:
            small = f"{self._name} has {there} bytes and cuDNN needs {needed}"
            if there < self._bytes:
                raise ValueError(
                    f"backend='cudnn': {small}: it was given other memory after plan()"
                )
            raise RefusedError(small)
        if capturing:
            self._captured.append(prepared)
        elif key not in self._kept:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = prepared
        return prepared.compute(call)


def _without_launch(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """0 and -inf: no request keeps a key."""
    out, lse, rows = call.out, call.lse, call.batch.rows
    if out is None:
        out = torch.zeros(call.out_shape, dtype=call.o_dtype, device=call.q.device)
    out[rows] = 0.0
    if lse is None and call.return_lse:
        lse = torch.full(call.lse_shape, -math.inf, dtype=torch.float32, device=call.q.device)
    elif lse is not None:
        lse[rows if call.batch.starts["stats"] else ...] = -math.inf
    return out, lse if call.return_lse else None


def _refuse_shared(call: Call, workspace_bytes: int) -> None:
    """Raises RefusedError where an output may be on an input."""
    if call.out is None and call.lse is None:
        return
    read = {"q": call.q, "k_cache": call.k, "v_cache": call.v, **call.batch.arrays()}
    # What its shape promises behind the end of its storage is another tensor's by now.
    if workspace_bytes == call.workspace.nbytes:
        read["workspace_buffer"] = call.workspace
    for name, written in (("out", call.out), ("lse", call.lse)):
        for other, value in read.items():
            # Other kernels tell interleaved tensors from overlapping ones, and refuse the latter.
            if written is not None and reaches_into(written, value):
                raise RefusedError(f"{name} and {other} are not apart in memory")


# Rows of results: no request has it; one has, and it keeps no key; it keeps one.
_NOBODYS, _KEYLESS, _LIVE = range(3)


class _Prepared:
    """A graph, and the arrays of a call as it reads them: on the device, offsets in elements.

    NOTE: wrappers keep it for as long as their plan, so it holds none of the call's tensors.
    """

    def __init__(self, call: Call) -> None:
        batch = call.batch
        max_qo_len = batch.max_qo_len
        if call.with_lse and batch.starts["stats"] is not None:
            # In graphs of one row cuDNN writes statistics elsewhere than at the offsets.
            max_qo_len = max(max_qo_len, 2)
        # Powers of two, so that serving builds few graphs. Requests that nobody has are of length
        # 0.
        sizes = (batch.size, max_qo_len, batch.max_kv_len)
        self._room = tuple(1 << (size - 1).bit_length() for size in sizes)
        self._device = call.q.device
        self._spare = self._room[0] - batch.size  # requests
        self._arrays = {
            "qo_lens": self._lengths(batch.qo_lens),
            "kv_lens": self._lengths(batch.kv_lens),
            **{f"{name}_offsets": self._offsets(call, name) for name in batch.starts},
            **dict.fromkeys(("page_table", "v_page_table"), self._page_table(call)),
        }
        self._kinds: dict[str, torch.Tensor] = {}  # of rows
        self.graph = _graph.built(self._described(call))

    def compute(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch, and what makes cuDNN's results those of the other kernels."""
        out, stats = self._prepared_out(call), None
        if call.with_lse:
            shape = call.lse_shape if call.lse is None else call.lse.shape
            if call.batch.starts["stats"] is None:
                shape = (*self._room[:2], call.q.shape[1])
            stats = torch.empty(shape, dtype=torch.float32, device=self._device)
        operands = {"q": call.q, "k": call.k, "v": call.v, "out": out, "stats": stats}
        self.graph.run(operands | self._arrays, call.workspace)
        check.written(call.out)
        lse = None if stats is None else self._finished_lse(call, stats)
        return out, lse if call.return_lse else None

    # The arrays.

    def _sent(self, value: torch.Tensor) -> torch.Tensor:
        return (sent(value, self._device) if value.is_cpu else value).contiguous()

    def _lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        lengths = lengths.int()
        return self._sent(pad(lengths, (0, self._spare)) if self._spare else lengths)

    def _page_table(self, call: Call) -> torch.Tensor | None:
        """As wide as cuDNN wants it: the pages of the longest request that there is room for. What
        lies behind those of a request is not followed."""
        table = call.batch.block_tables
        if table is None:
            return None
        pages = -(-self._room[2] // call.k.shape[2])
        spare = max(pages - table.shape[1], 0)
        return self._sent(pad(table[:, :pages], (0, spare, 0, self._spare)))

    def _offsets(self, call: Call, name: str) -> torch.Tensor | None:
        """[batch_size + 1] elements, in 64 bits where they are computed.

        The one request that needs none gets them, too: without offsets cuDNN writes all rows that
        a graph has room for, also behind the end of `out`.
        """
        at, batch, width = call.batch.starts[name], call.batch, call.per_token(name)
        if at is None or (name == "stats" and not call.with_lse):
            return None
        lengths = batch.kv_lens if name in ("k", "v") else batch.qo_lens
        given = at.given
        if given is None:
            given = torch.zeros(1, dtype=torch.int64, device=lengths.device)
        if at.in_tokens:
            given = given.to(torch.int64) * width
        if given.numel() == batch.size:
            given = self._sent(given).to(torch.int64)
            end = given[-1:] + self._sent(lengths)[-1:] * width
            given = torch.cat([given, end])
        if self._spare:
            given = torch.cat([given, given[-1:].expand(self._spare)])
        return self._sent(given)

    def _described(self, call: Call) -> Graph:
        batch_size, max_qo_len, max_kv_len = self._room
        table = self._arrays["page_table"]

        def described(name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Described:
            if len(shape) == 4:
                return Described(tuple(shape), (*stride[:3], 1))
            (_, heads, dim), (token, head, _) = shape, stride
            longest = max_kv_len if name in "kv" else max_qo_len
            offsets = self._arrays[f"{name}_offsets"]
            return Described(
                (batch_size, heads, longest, dim),
                (longest * token, head, token, 1),
                None if offsets is None else offsets.dtype,
            )

        read = {"q": call.q, "k": call.k, "v": call.v}
        layouts = {name: (tensor.shape, tensor.stride()) for name, tensor in read.items()}
        tokens, heads, dim = shape = call.out_shape
        layouts["out"] = shape, (heads * dim, dim, 1) if call.out is None else call.out.stride()
        if call.with_lse:
            layouts["stats"] = (tokens, heads, 1), (heads, 1, 1)
        return Graph(
            device=call.q.device,
            dtype=call.q.dtype,
            scale=call.sm_scale,
            causal=call.causal,
            max_kv_len=max_kv_len,
            table_width=0 if table is None else table.shape[1],
            **{name: described(name, *layout) for name, layout in layouts.items()},
        )

    # The results.

    def _kinds_of(self, call: Call, name: str, count: int) -> torch.Tensor:
        """Of the rows of out or stats, uint8; padded stats: [batch_size, max_qo_len] that there is
        room for.

        Of what a wrapper has planned they are computed once, for all layers.
        """
        if name in self._kinds:
            return self._kinds[name]
        row = torch.arange(self._room[1], device=self._device)
        qo_len, kv_len = self._arrays["qo_lens"][:, None], self._arrays["kv_lens"][:, None]
        owned = row < qo_len
        live = owned & (kv_len > 0)
        if call.causal:
            live = live & (row + kv_len >= qo_len)
        kinds = owned.to(torch.uint8) + live
        offsets = self._arrays[f"{name}_offsets"]
        if offsets is not None:
            at = row + offsets[:-1, None].to(torch.int64) // max(call.per_token(name), 1)
            at = torch.where(owned, at, count)  # one row more, for those that no request has
            placed = torch.zeros(count + 1, dtype=torch.uint8, device=self._device)
            kinds = placed.scatter_(0, at.reshape(-1), kinds.view(-1))[:count]
        self._kinds[name] = kinds
        return kinds

    def _prepared_out(self, call: Call) -> torch.Tensor:
        """Returns out with 0 where cuDNN does not write: in rows of requests without keys and, if
        the call allocates out, in rows of no request."""
        out = call.out
        if out is None:
            return torch.zeros(call.out_shape, dtype=call.o_dtype, device=self._device)
        if call.batch.maybe_keyless:
            kinds = self._kinds_of(call, "out", out.shape[0])
            out.masked_fill_((kinds == _KEYLESS)[:, None, None], 0.0)
        return out

    def _finished_lse(self, call: Call, stats: torch.Tensor) -> torch.Tensor:
        """cuDNN's natural logarithms in the base asked for, and -inf where no key is kept."""
        if call.lse_base == "log2":
            stats *= 1.0 / math.log(2.0)
        heads = call.q.shape[1]
        kinds = self._kinds_of(call, "stats", stats.numel() // heads)
        flat = stats.view(*kinds.shape, heads)
        flat.masked_fill_((kinds != _LIVE)[..., None], -math.inf)
        if call.batch.starts["stats"] is None:
            flat = flat[: call.batch.size, : call.batch.max_qo_len]
            lse = stats.new_empty(call.lse_shape) if call.lse is None else call.lse
            return lse.copy_(flat)
        if call.lse is None:
            return stats
        lse = call.lse.view(-1, heads)
        lse.copy_(torch.where((kinds != _NOBODYS)[:, None], flat, lse))
        return call.lse
