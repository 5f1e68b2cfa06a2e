"""A `cudnn` module that computes: what the frontend is told, and memory as cuDNN would read it.

Graphs are carried out on the CPU from nothing but the declared dimensions, strides, offsets and the
addresses of a run, so wrong ones give wrong numbers. As on the GPU, rows of requests without keys
are not written, and the log-sum-exp is a natural logarithm.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import math
import threading
from types import SimpleNamespace

import torch
from preflash._cudnn import execution, graph

DTYPES = {
    "HALF": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "FLOAT": torch.float32,
    "INT32": torch.int32,
    "INT64": torch.int64,
}
data_type = enum.Enum("data_type", list(DTYPES))
heur_mode = enum.Enum("heur_mode", ["A"])


class cudnnGraphNotSupportedError(Exception):  # noqa: N801, the frontend's name
    pass


class Tensor:
    def __init__(self, name="", dim=None, stride=None, data_type=None):
        self.name, self.dim, self.stride, self.data_type = name, dim, stride, data_type
        self.uid = self.offsets = None

    def _set(self, name, value):
        setattr(self, name, value)
        return self

    def set_uid(self, uid):
        return self._set("uid", uid)

    def set_output(self, wanted):
        return self._set("is_output", wanted)

    def set_data_type(self, data_type):
        return self._set("data_type", data_type)

    def set_dim(self, dim):
        return self._set("dim", list(dim))

    def set_stride(self, stride):
        return self._set("stride", list(stride))

    def set_ragged_offset(self, offsets):
        return self._set("offsets", offsets)

    def at(self, addresses, size, stride, offset=0):
        """Its memory from an element on, as a tensor."""
        dtype = DTYPES[self.data_type.name]
        address = addresses[self.uid] + offset * dtype.itemsize
        if 0 in size:
            return torch.empty(size, dtype=dtype, device="cpu")
        reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)

    def values(self, addresses):
        return self.at(addresses, self.dim, self.stride)

    def of_request(self, addresses, request, tokens):
        """[heads, tokens, dim]"""
        start = request * self.stride[0]
        if self.offsets is not None:
            start = int(self.offsets.values(addresses).flatten()[request])
        _, heads, _, dim = self.dim
        return self.at(addresses, (heads, tokens, dim), self.stride[1:], start)


class FakeCudnn(SimpleNamespace):
    """The module. `graphs` are those that were built, `runs` the addresses of all runs."""

    def __init__(self, refuse=None, workspace_bytes=64):
        super().__init__(graphs=[], runs=[], handles=0)
        self.data_type, self.heur_mode = data_type, heur_mode
        self.cudnnGraphNotSupportedError = cudnnGraphNotSupportedError
        self.refuse, self.workspace_bytes = refuse, workspace_bytes

    def create_handle(self):
        self.handles += 1
        return object()

    def set_stream(self, handle, stream):
        assert stream == 0

    def pygraph(self, **options):
        return Graph(self, options)


def install(monkeypatch, module):
    """Makes it the cuDNN of tensors on the CPU."""
    monkeypatch.setattr(graph, "_load", lambda: (module, None))
    monkeypatch.setattr(graph, "_handles", threading.local())
    monkeypatch.setattr(graph, "_kept", functools.lru_cache(graph._kept.__wrapped__))
    monkeypatch.setattr(execution, "DEVICE_TYPE", "cpu")
    return module


class Graph:
    def __init__(self, module, options):
        self.module, self.options = module, options

    def tensor(self, **description):
        return Tensor(**description)

    def sdpa(self, **options):
        self.attention = options
        self.out, self.stats = Tensor("out"), Tensor("stats")
        return self.out, self.stats if options["generate_stats"] else None

    def validate(self):
        pass

    build_operation_graph = check_support = build_plans = validate

    def create_execution_plans(self, modes):
        if self.module.refuse:
            raise cudnnGraphNotSupportedError(self.module.refuse)
        self.module.graphs.append(self)

    def get_workspace_size(self):
        return self.module.workspace_bytes

    def execute(self, addresses, workspace, handle):
        assert workspace
        assert handle is not None
        self.module.runs.append(dict(addresses))
        a = self.attention
        assert a["use_padding_mask"]
        assert a["compute_data_type"] is data_type.FLOAT
        # Without offsets all declared rows are read and written, also those behind the tensor.
        assert a["q"].offsets is not None
        assert self.out.offsets is not None
        paged = "paged_attention_k_table" in a
        assert paged or None not in (a["k"].offsets, a["v"].offsets)
        qo_lens = a["seq_len_q"].values(addresses).flatten().tolist()
        kv_lens = a["seq_len_kv"].values(addresses).flatten().tolist()
        for request, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
            assert qo_len <= a["q"].dim[2]
            if qo_len and kv_len:
                self._attend(addresses, request, qo_len, kv_len)

    def _keys(self, addresses, name, request, kv_len):
        """[heads, tokens, dim] float64"""
        tensor = self.attention[name]
        table = self.attention.get(f"paged_attention_{name}_table")
        if table is None:
            assert kv_len <= tensor.dim[2]
            return tensor.of_request(addresses, request, kv_len).double()
        assert kv_len <= self.attention["paged_attention_max_seq_len_kv"]
        page_size = tensor.dim[2]
        longest = self.attention["paged_attention_max_seq_len_kv"]
        assert table.dim[2] == -(-longest // page_size)
        pages = table.values(addresses)[request, 0, : -(-kv_len // page_size), 0].long()
        pool = tensor.values(addresses)[pages].double()  # [pages, heads, page_size, dim]
        return pool.transpose(0, 1).flatten(1, 2)[:, :kv_len]

    def _attend(self, addresses, request, qo_len, kv_len):
        a = self.attention
        q = a["q"].of_request(addresses, request, qo_len).double()
        k, v = (self._keys(addresses, name, request, kv_len) for name in "kv")
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        logits = q @ k.transpose(1, 2) * a["attn_scale"]
        if a["use_causal_mask_bottom_right"]:
            rows = torch.arange(qo_len, device="cpu")[:, None]
            keep = torch.arange(kv_len, device="cpu") <= rows + kv_len - qo_len
            logits.masked_fill_(~keep, -math.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        weights = (logits - lse).exp().nan_to_num(0.0)
        self.out.of_request(addresses, request, qo_len).copy_(weights @ v)
        if a["generate_stats"]:
            # Where graphs have one row, cuDNN's engines write statistics elsewhere.
            assert self.stats.offsets is None or self.stats.dim[2] > 1
            self.stats.of_request(addresses, request, qo_len).copy_(lse)
