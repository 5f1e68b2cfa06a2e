"""cuDNN's scaled dot product attention: graphs built by the cuDNN frontend, kept and run.

Needs torch and, where something is to run, the `cudnn` module of the nvidia-cudnn-frontend package;
nothing else of this package, so it can be imported alone.

A graph fixes everything but addresses and the values in device arrays: lengths, offsets and page
tables are read when it runs, so the host never waits, and a captured run follows what the arrays
hold when it is replayed.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch

OLDEST_BACKEND = 90700  # cuDNN 9.7: causal masks that end at the last key, for any lengths
INSTALL = "pip install nvidia-cudnn-frontend (the extra preflash[cudnn])"

_GRAPHS_KEPT = 256


class UnsupportedError(Exception):
    """cuDNN has no kernel for a graph; its own words."""


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """The module, or why there is none."""
    try:
        import cudnn
    except ImportError as error:
        return None, f"the module cudnn does not import ({error}): {INSTALL}"
    except Exception as error:  # what a broken library raises is no error of the caller's
        return None, f"the module cudnn does not import: {type(error).__name__}: {error}"
    if not hasattr(cudnn, "pygraph"):
        return None, f"the module cudnn is not NVIDIA's ({cudnn!r}): {INSTALL}"
    try:
        version = cudnn.backend_version()
    except Exception as error:
        return None, f"the module cudnn finds no libcudnn ({error}): pip install nvidia-cudnn-cu13"
    if version < OLDEST_BACKEND:
        return None, f"libcudnn is {version}; must be at least {OLDEST_BACKEND}"
    return cudnn, None


def why_missing() -> str | None:
    """None where cuDNN can be called, or the sentence that says why not."""
    return _load()[1]


class Stats(enum.Enum):
    """Where the log-sum-exp goes."""

    NONE = "none"
    PADDED = "padded"  # [batch, max_qo_len, num_qo_heads]
    AT_OFFSETS = "at_offsets"  # each request's [qo_len, num_qo_heads] at an offset of its own


class Rows(NamedTuple):
    """Strides of [token, head] of a tensor whose requests start at offsets, in elements."""

    token: int
    head: int


class Pages(NamedTuple):
    """A pool of pages: how many, their size, strides of [page, head, token] in elements."""

    count: int
    size: int
    page: int
    head: int
    token: int


class Graph(NamedTuple):
    """Everything that is fixed when a graph is built; hence its key."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    max_qo_len: int
    max_kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    scale: float
    causal: bool
    q: Rows
    out: Rows
    k: Rows | Pages
    v: Rows | Pages
    stats: Stats
    # The dtype of each array of offsets, of q, out, k, v and stats; None: no such array, because of
    # pages or padded stats. NOTE: of outputs without offsets cuDNN writes all declared rows, and
    # what it reads behind a request's last key reaches the result.
    offsets: tuple[torch.dtype | None, ...]
    table_width: int = 0  # pages in a row of the page table; 0: not paged

    @property
    def paged(self) -> bool:
        return self.table_width > 0


class Operands(NamedTuple):
    """The tensors of one run. Arrays are int32 or int64, contiguous, on the graph's device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    stats: torch.Tensor | None
    qo_lens: torch.Tensor  # [batch_size] int32
    kv_lens: torch.Tensor  # [batch_size] int32
    q_offsets: torch.Tensor | None = None  # [batch_size + 1], elements
    out_offsets: torch.Tensor | None = None
    k_offsets: torch.Tensor | None = None
    v_offsets: torch.Tensor | None = None
    stats_offsets: torch.Tensor | None = None
    page_table: torch.Tensor | None = None  # [batch_size, table_width] int32


# What the frontend calls a tensor: one number for each field of Operands, and one more because K
# and V have each their page table.
_UIDS = {name: uid for uid, name in enumerate((*Operands._fields, "v_page_table"), start=1)}


class _Handles(threading.local):
    """A cuDNN handle of each device: no two threads may use one at a time."""

    def __init__(self) -> None:
        self.of_device: dict[torch.device, Any] = {}


_handles = _Handles()


def _handle(cudnn: ModuleType, device: torch.device) -> Any:
    """This thread's, on the device's current stream."""
    handle = _handles.of_device.get(device)
    if handle is None:
        with _current(device):
            handle = _handles.of_device[device] = cudnn.create_handle()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    cudnn.set_stream(handle, stream)
    return handle


def _current(device: torch.device) -> AbstractContextManager:
    """cuDNN works on the device that is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class BuiltGraph:
    """A graph that cuDNN has a kernel for."""

    def __init__(self, cudnn: ModuleType, graph: Any, description: Graph) -> None:
        self._cudnn = cudnn
        self._graph = graph
        self._device = description.device
        self.workspace_bytes = int(graph.get_workspace_size())

    def run(self, operands: Operands, workspace: torch.Tensor) -> None:
        """On the device's current stream. Nothing is allocated and nobody waits."""
        addresses = {
            _UIDS[name]: tensor.data_ptr()
            for name, tensor in operands._asdict().items()
            if tensor is not None
        }
        if operands.page_table is not None:
            addresses[_UIDS["v_page_table"]] = operands.page_table.data_ptr()
        handle = _handle(self._cudnn, self._device)
        with _current(self._device):
            self._graph.execute(addresses, workspace.data_ptr(), handle=handle)


class _Cache:
    """The graphs used last, or why cuDNN refuses them."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[Graph, BuiltGraph | UnsupportedError] = OrderedDict()
        self.lock = threading.Lock()


_cache = _Cache()


def built(description: Graph) -> BuiltGraph:
    """The graph, built when it is asked for the first time, which takes up to a second.

    Raises:
        UnsupportedError: cuDNN has no kernel for it, or is not there.
    """
    with _cache.lock:
        found = _cache.graphs.get(description)
        if found is not None:
            _cache.graphs.move_to_end(description)
    if found is None:
        try:
            found = _build(description)
        except UnsupportedError as error:
            found = error
        with _cache.lock:
            _cache.graphs[description] = found
            while len(_cache.graphs) > _GRAPHS_KEPT:
                _cache.graphs.popitem(last=False)
    if isinstance(found, UnsupportedError):
        raise UnsupportedError(*found.args)
    return found


def is_known(description: Graph) -> bool:
    """Whether built() would answer without building."""
    with _cache.lock:
        return description in _cache.graphs


def forget() -> None:
    """Drops every graph."""
    with _cache.lock:
        _cache.graphs.clear()


def _build(description: Graph) -> BuiltGraph:
    cudnn, missing = _load()
    if cudnn is None:
        raise UnsupportedError(missing)
    handle = _handle(cudnn, description.device)
    try:
        with _current(description.device):
            graph = _Builder(cudnn, description, handle).graph()
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(f"{type(error).__name__}: {error}") from error
    return BuiltGraph(cudnn, graph, description)


class _Builder:
    """From a description to the frontend's graph, not yet planned."""

    def __init__(self, cudnn: ModuleType, description: Graph, handle: Any) -> None:
        self._types = {
            torch.float16: cudnn.data_type.HALF,
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.int32: cudnn.data_type.INT32,
            torch.int64: cudnn.data_type.INT64,
        }
        self._float = cudnn.data_type.FLOAT
        self._d = description
        self._graph = cudnn.pygraph(
            io_data_type=self._types[description.dtype],
            intermediate_data_type=self._float,
            compute_data_type=self._float,
            handle=handle,
        )

    def graph(self) -> Any:
        d = self._d
        q_at, out_at, k_at, v_at, stats_at = d.offsets
        q = self._tokens("q", d.q, (d.num_qo_heads, d.max_qo_len, d.head_dim_qk), q_at)
        k = self._keys("k", d.k, d.head_dim_qk, k_at)
        v = self._keys("v", d.v, d.head_dim_vo, v_at)
        options = {}
        if d.paged:
            options = {
                "paged_attention_k_table": self._table("page_table"),
                "paged_attention_v_table": self._table("v_page_table"),
                "paged_attention_max_seq_len_kv": d.max_kv_len,
            }
        out, stats = self._graph.sdpa(
            q=q,
            k=k,
            v=v,
            attn_scale=d.scale,
            generate_stats=d.stats is not Stats.NONE,
            use_padding_mask=True,
            seq_len_q=self._array("qo_lens", (d.batch_size, 1, 1, 1), torch.int32),
            seq_len_kv=self._array("kv_lens", (d.batch_size, 1, 1, 1), torch.int32),
            use_causal_mask_bottom_right=d.causal,
            compute_data_type=self._float,
            **options,
        )
        shape = (d.num_qo_heads, d.max_qo_len, d.head_dim_vo)
        self._output("out", out, d.out, shape, self._types[d.dtype], out_at)
        if d.stats is not Stats.NONE:
            rows = Rows(token=d.num_qo_heads, head=1)
            shape = (d.num_qo_heads, d.max_qo_len, 1)
            self._output("stats", stats, rows, shape, self._float, stats_at)
        return self._graph

    def _tokens(
        self, name: str, rows: Rows, shape: tuple[int, int, int], offsets: torch.dtype | None
    ) -> Any:
        """[batch, heads, tokens, head_dim] whose requests start at offsets."""
        tensor = self._graph.tensor(
            name=name,
            dim=[self._d.batch_size, *shape],
            stride=[shape[1] * rows.token, rows.head, rows.token, 1],
            data_type=self._types[self._d.dtype],
        )
        tensor.set_uid(_UIDS[name])
        if offsets is not None:
            tensor.set_ragged_offset(self._offsets(name, offsets))
        return tensor

    def _keys(
        self, name: str, where: Rows | Pages, head_dim: int, offsets: torch.dtype | None
    ) -> Any:
        d = self._d
        if isinstance(where, Rows):
            return self._tokens(name, where, (d.num_kv_heads, d.max_kv_len, head_dim), offsets)
        tensor = self._graph.tensor(
            name=name,
            dim=[where.count, d.num_kv_heads, where.size, head_dim],
            stride=[where.page, where.head, where.token, 1],
            data_type=self._types[d.dtype],
        )
        return tensor.set_uid(_UIDS[name])

    def _output(
        self,
        name: str,
        tensor: Any,
        rows: Rows,
        shape: tuple[int, int, int],
        data_type: Any,
        offsets: torch.dtype | None,
    ) -> None:
        tensor.set_output(True).set_uid(_UIDS[name]).set_data_type(data_type)
        tensor.set_dim([self._d.batch_size, *shape])
        tensor.set_stride([shape[1] * rows.token, rows.head, rows.token, 1])
        if offsets is not None:
            tensor.set_ragged_offset(self._offsets(name, offsets))

    def _offsets(self, name: str, dtype: torch.dtype) -> Any:
        return self._array(f"{name}_offsets", (self._d.batch_size + 1, 1, 1, 1), dtype)

    def _table(self, name: str) -> Any:
        return self._array(name, (self._d.batch_size, 1, self._d.table_width, 1), torch.int32)

    def _array(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        _, first, second, _ = shape
        tensor = self._graph.tensor(
            name=name,
            dim=list(shape),
            stride=[first * second, second, 1, 1],
            data_type=self._types[dtype],
        )
        return tensor.set_uid(_UIDS[name])
