"""cuDNN's scaled dot product attention: graphs built by the cuDNN frontend, kept and run.

Needs torch and, where something is to run, the `cudnn` module of the nvidia-cudnn-frontend package.

A graph fixes everything but addresses and the values in device arrays: lengths, offsets and page
tables are read when it runs, so the host never waits, and a captured run follows what the arrays
hold when it is replayed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .._check import extras

OLDEST_BACKEND = 90700  # cuDNN 9.7: causal masks that end at the last key, for any lengths

_GRAPHS_KEPT = 256


class RefusedError(Exception):
    """Why cuDNN does not serve a call; a sentence without an end."""


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """The module, or why there is none."""
    try:
        import cudnn
    except ImportError as error:
        return None, extras.not_imported("cudnn", error)
    except Exception as error:  # what a broken library raises is no error of the caller's
        return None, f"the module cudnn does not import: {type(error).__name__}: {error}"
    if not hasattr(cudnn, "pygraph"):
        install = extras.pip_line("cudnn")
        return None, f"the module cudnn is not NVIDIA's ({cudnn!r}): {install}"
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


class Described(NamedTuple):
    """A tensor as a graph declares it: [batch, heads, tokens, head_dim], or a pool of pages [pages,
    heads, page_size, head_dim]. Strides are in elements."""

    dim: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    # The dtype of the array of the elements at which requests start; None: pages, or padded
    # statistics. NOTE: of outputs without offsets cuDNN writes all declared rows, and what it reads
    # behind a request's last key reaches the result.
    offsets: torch.dtype | None = None


class Graph(NamedTuple):
    """Everything that is fixed when a graph is built; hence its key."""

    device: torch.device
    dtype: torch.dtype
    scale: float
    causal: bool
    max_kv_len: int
    q: Described
    k: Described
    v: Described
    out: Described
    stats: Described | None = None  # the log-sum-exp, natural logarithms; None: not wanted
    table_width: int = 0  # pages in a row of the page table; 0: not paged


# What the frontend calls a tensor of a run. K and V have each their page table.
_NAMES = ("q", "k", "v", "out", "stats", "qo_lens", "kv_lens", "q_offsets", "out_offsets")
_NAMES += ("k_offsets", "v_offsets", "stats_offsets", "page_table", "v_page_table")
_UIDS = {name: uid for uid, name in enumerate(_NAMES, start=1)}


_handles = threading.local()  # no two threads may use one at a time


def _handle(cudnn: ModuleType, device: torch.device) -> Any:
    """This thread's, on the device's current stream."""
    of_device = vars(_handles).setdefault("of_device", {})
    if device not in of_device:
        with _current(device):
            of_device[device] = cudnn.create_handle()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    cudnn.set_stream(of_device[device], stream)
    return of_device[device]


def _current(device: torch.device) -> AbstractContextManager:
    """cuDNN works on the device that is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class BuiltGraph(NamedTuple):
    """A graph that cuDNN has a kernel for."""

    cudnn: ModuleType
    graph: Any
    device: torch.device
    workspace_bytes: int

    def run(self, operands: Mapping[str, torch.Tensor | None], workspace: torch.Tensor) -> None:
        """On the device's current stream. Nothing is allocated and nobody waits.

        operands: by the names of _UIDS. Arrays are contiguous, on the graph's device: qo_lens,
        kv_lens [batch_size] and page_table, v_page_table [batch_size, table_width] int32, and the
        offsets [batch_size + 1] of the dtypes that the graph declares.
        """
        given = {name: tensor for name, tensor in operands.items() if tensor is not None}
        addresses = {_UIDS[name]: tensor.data_ptr() for name, tensor in given.items()}
        handle = _handle(self.cudnn, self.device)
        with _current(self.device):
            self.graph.execute(addresses, workspace.data_ptr(), handle=handle)


def built(description: Graph) -> BuiltGraph:
    """The graph, built when it is asked for the first time, which takes up to a second.

    Raises:
        RefusedError: cuDNN has no kernel for it, or is not there.
    """
    found = _kept(description)
    if isinstance(found, str):
        raise RefusedError(f"cuDNN has no kernel for it ({found})")
    return found


@functools.lru_cache(_GRAPHS_KEPT)
def _kept(description: Graph) -> BuiltGraph | str:
    """The graph, or why cuDNN refuses it. An error that is raised is not kept."""
    if description.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "this call needs a graph of cuDNN's, which cannot be built while its stream is "
            "being captured into a CUDA graph: call it once before, with the same shapes, "
            "maxima and scale"
        )
    cudnn, missing = _load()
    if cudnn is None:
        return missing
    handle = _handle(cudnn, description.device)
    try:
        with _current(description.device):
            graph = _declared(cudnn, description, handle)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return BuiltGraph(cudnn, graph, description.device, int(graph.get_workspace_size()))


def _declared(cudnn: ModuleType, d: Graph, handle: Any) -> Any:
    """The frontend's graph, not yet planned."""
    types = {
        torch.float16: cudnn.data_type.HALF,
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float32: cudnn.data_type.FLOAT,
        torch.int32: cudnn.data_type.INT32,
        torch.int64: cudnn.data_type.INT64,
    }
    real, batch_size = types[torch.float32], d.q.dim[0]
    graph = cudnn.pygraph(
        io_data_type=types[d.dtype],
        intermediate_data_type=real,
        compute_data_type=real,
        handle=handle,
    )

    def declare(name: str, dim: tuple, stride: tuple, dtype: torch.dtype) -> Any:
        tensor = graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=types[dtype])
        tensor.set_uid(_UIDS[name])
        return tensor

    def array(name: str, rows: int, width: int = 1, dtype: torch.dtype = torch.int32) -> Any:
        return declare(name, (rows, 1, width, 1), (width, width, 1, 1), dtype)

    def placed(name: str, tensor: Any, t: Described) -> Any:
        if t.offsets is not None:
            tensor.set_ragged_offset(array(f"{name}_offsets", batch_size + 1, dtype=t.offsets))
        return tensor

    def read(name: str, t: Described) -> Any:
        return placed(name, declare(name, t.dim, t.stride, d.dtype), t)

    def write(name: str, tensor: Any, t: Described, dtype: torch.dtype) -> None:
        tensor.set_output(True).set_uid(_UIDS[name]).set_data_type(types[dtype])
        tensor.set_dim(list(t.dim))
        tensor.set_stride(list(t.stride))
        placed(name, tensor, t)

    q, k, v = read("q", d.q), read("k", d.k), read("v", d.v)
    paging = {}
    if d.table_width:
        paging = {
            "paged_attention_k_table": array("page_table", batch_size, d.table_width),
            "paged_attention_v_table": array("v_page_table", batch_size, d.table_width),
            "paged_attention_max_seq_len_kv": d.max_kv_len,
        }
    out, stats = graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=d.scale,
        generate_stats=d.stats is not None,
        use_padding_mask=True,
        seq_len_q=array("qo_lens", batch_size),
        seq_len_kv=array("kv_lens", batch_size),
        use_causal_mask_bottom_right=d.causal,
        compute_data_type=real,
        **paging,
    )
    write("out", out, d.out, d.dtype)
    if d.stats is not None:
        write("stats", stats, d.stats, torch.float32)
    return graph
