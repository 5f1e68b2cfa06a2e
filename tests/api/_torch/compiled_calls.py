"""Each public call is here a function of tensors, which torch.compile takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import preflash
import torch
from fuzz.guarded import bits
from planned_cases import planned
from preflash.testing import Case, KvForm, build, runner

PAGED = Case("paged", (33, 5, 0), (40, 90, 7), 4, 2, 64, page_size=4)
WHOLE = dataclasses.replace(PAGED, name="whole", form=KvForm.COMBINED)
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64)
ONE = Case("one", (33,), (40,), 4, 2, 64)
DECODE = Case("decode", (1, 1, 1), (40, 90, 7), 4, 2, 64, page_size=4)


@dataclasses.dataclass
class Call:
    name: str
    operators: str  # what a graph of the call holds
    tensors: list[torch.Tensor]
    function: Callable[..., Any]
    written: tuple[int, ...] = ()  # which tensors the function writes

    def fresh(self) -> list[torch.Tensor]:
        """Returns the tensors, with copies of those that are written."""
        return [t.clone() if i in self.written else t for i, t in enumerate(self.tensors)]


def paged(target) -> Iterator[Call]:
    inputs, wrapper = planned(PAGED, target)
    qkv = [inputs.q, *inputs.cache]
    forward, with_lse = wrapper.forward, wrapper.forward_return_lse
    window = {"window_left": 9, "v_scale": 0.5, "q_scale": 2}
    options = {"causal": True, "sm_scale": 0.3, "logits_soft_cap": 9}
    yield Call("paged", "run", qkv, lambda q, k, v: wrapper.run(q, (k, v), **window))
    yield Call("forward", "forward", qkv, lambda q, k, v: forward(q, (k, v), **options))
    yield Call(
        "forward_lse", "forward_return_lse", qkv, lambda q, k, v: with_lse(q, (k, v), window_left=7)
    )
    inputs_whole, whole = planned(WHOLE, target)
    cache = [inputs_whole.q, inputs_whole.cache]
    scaled = [*cache, target.to(torch.tensor([0.5, -1.0, 2.0, -torch.inf])), torch.tensor([0.7])]
    yield Call("whole_cache", "run", cache, lambda q, kv: whole.run(q, kv))
    yield Call(
        "sinks_and_scale", "run", scaled, lambda *t: whole.run(*t[:2], sinks=t[2], k_scale=t[3])
    )


def ragged(target) -> Iterator[Call]:
    inputs, wrapper = planned(RAGGED, target)
    qkv = [inputs.q, inputs.k, inputs.v]
    out, lse = torch.empty_like(inputs.q), inputs.q.new_empty(4, 38, dtype=torch.float32)
    by_head = {"lse_layout": "HN", "lse_base": "ln"}

    def into_both(q, k, v, out, lse):
        given = wrapper.run(q, k, v, out=out, lse=lse, return_lse=True, **by_head)
        assert given[0] is out
        return (*given, out + 1)

    def into_q(q, k, v):
        packed = q * 1
        wrapper.run(packed, k, v, out=packed)
        return packed

    def into_lse(q, k, v, lse):
        return wrapper.run(q, k, v, lse=lse, lse_layout="HN"), lse * 1

    yield Call("ragged", "run", qkv, lambda q, k, v: wrapper.run(q, k, v))
    yield Call("lse", "run_return_lse", qkv, lambda q, k, v: wrapper.run(q, k, v, True, **by_head))
    yield Call("into", "run_into", [*qkv, out, lse], into_both, (3, 4))
    yield Call("into_q", "run_into", qkv, into_q)
    yield Call("into_lse", "run_into", [*qkv, lse], into_lse, (3,))


def single(target) -> Iterator[Call]:
    inputs = build(ONE, device=target.device)
    qkv = [inputs.q, inputs.k[:40], inputs.v[:40]]
    mask = target.to(torch.rand(33, 40, generator=torch.Generator().manual_seed(0)) < 0.7)

    def one(*args, **options):
        return preflash.single_prefill_with_kv_cache(*args, **options, backend=target.backend)

    def with_lse(q, k, v):
        return one(q, k, v, return_lse=True, sm_scale=0.2, window_left=8)

    def decode(q, k, v):
        return preflash.single_decode_with_kv_cache(q[0], k, v, return_lse=True)

    outs = [*qkv, torch.empty_like(inputs.q)]
    yield Call("single", "single", qkv, lambda q, k, v: one(q, k, v, causal=True))
    yield Call("single_lse", "single_return_lse", qkv, with_lse)
    yield Call("single_mask", "single", [*qkv, mask], lambda q, k, v, mask: one(q, k, v, mask))
    yield Call("single_into", "single_into", outs, lambda *t: one(*t[:3], out=t[3]), (3,))
    yield Call("single_decode", "single_return_lse", qkv, decode)


def other_wrappers(target) -> Iterator[Call]:
    inputs = build(DECODE, device=target.device)
    qkv = [inputs.q, *inputs.cache]
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    heads = (DECODE.num_qo_heads, DECODE.num_kv_heads, DECODE.head_dim, DECODE.page_size)
    dtypes = {"q_data_type": DECODE.dtype, "kv_data_type": DECODE.dtype}
    buffer = runner.workspace(target.device)
    decode = preflash.BatchDecodeWithPagedKVCacheWrapper(buffer, backend=target.backend)
    decode.plan(*table, *heads, **dtypes)
    sinks = target.to(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    sink = preflash.BatchAttentionWithAttentionSinkWrapper(
        buffer, backend=target.backend, head_dim_qk=64, head_dim_vo=64
    )
    sink.plan(inputs.qo_indptr, *table, *heads, **dtypes)
    cascade = preflash.MultiLevelCascadeAttentionWrapper(2, buffer)
    cascade.plan([inputs.qo_indptr] * 2, *([array] * 2 for array in table), *heads, **dtypes)

    def merged(q, k, v):
        return cascade.run(q.float().to(q.dtype), (k, v))

    yield Call("decode", "run", qkv, lambda q, k, v: decode.run(q, (k, v)))
    yield Call(
        "sink_wrapper", "run", [*qkv, sinks], lambda q, k, v, s: sink.run(q, (k, v), s, 0.25)
    )
    yield Call("cascade", "run_return_lse merge_state_in_place", qkv, merged)


def blocks(target) -> Iterator[Call]:
    inputs = build(ONE, device=target.device)
    q, k, v = inputs.q[:32], inputs.k[:40], inputs.v[:40]
    buffer = runner.workspace(target.device)
    blocks = preflash.BlockSparseAttentionWrapper(buffer, target.backend)
    dtypes = {"q_data_type": ONE.dtype, "o_data_type": torch.float32}
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 4])
    blocks.plan(indptr, indices, 32, 40, 16, 8, 4, 2, 64, **dtypes)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    sizes = preflash.VariableBlockSparseAttentionWrapper(buffer, target.backend)
    kept = torch.tensor([[[1, 0], [1, 1]], [[0, 0], [0, 1]]])
    rows, columns = torch.tensor([[10, 22]] * 2), torch.tensor([[16, 24], [40, 0]])
    sizes.plan(kept, rows, columns, 4, 2, 64, q_data_type=ONE.dtype)
    by_head = [x.transpose(0, 1).contiguous() for x in (q, k, v)]

    def into(q, k, v, out):
        return blocks.run(q, k, v, out=out, return_lse=True)

    yield Call("blocks", "run_return_lse", [q, k, v, out], into, (3,))
    yield Call("block_sizes", "run", by_head, lambda q, k, v: sizes.run(q, k, v))


def merges(target) -> Iterator[Call]:
    generator = torch.Generator().manual_seed(0)
    v = target.to(torch.randn(9, 2, 3, 16, generator=generator))
    s = target.to(torch.randn(9, 2, 3, generator=generator))
    halves = [v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1], s[:, 1]]
    masked = [*halves, target.to(torch.arange(9) % 2 == 0)]

    def in_place(own_v, own_s, v, s, mask):
        preflash.merge_state_in_place(own_v, own_s, v, s, mask)
        return own_v * 2, own_s * 2

    yield Call("merge_state", "merge_state", halves, lambda *t: preflash.merge_state(*t))
    yield Call("merge_states", "merge_states", [v, s], lambda v, s: preflash.merge_states(v, s))
    yield Call("in_place", "merge_state_in_place", masked, in_place, (0, 1))


def masks(target) -> Iterator[Call]:
    bits = target.to(torch.rand(37, generator=torch.Generator().manual_seed(0)) < 0.5)
    segments, indptr = preflash.segment_packbits, torch.tensor([0, 9, 9, 37])
    yield Call("packbits", "packbits", [bits], lambda x: preflash.packbits(x, bitorder="little"))
    yield Call("segment_packbits", "segment_packbits", [bits, indptr], lambda *t: segments(*t))


def pages(target) -> Iterator[Call]:
    *table, appended = (
        target.to(torch.tensor(numbers).int())
        for numbers in ([4, 1, 2], [0, 2, 3], [2, 3], [0, 3, 4])
    )
    generator = torch.Generator().manual_seed(0)
    key, value, *caches = (
        target.to(torch.randn(shape, generator=generator))
        for shape in [(4, 2, 8)] * 2 + [(5, 4, 2, 8)] * 2
    )

    def append(key, value, cache, *table):
        page_lengths = preflash.get_seq_lens(table[1], table[2], 4)
        places = preflash.get_batch_indices_positions(appended, page_lengths, 4)
        preflash.append_paged_kv_cache(key * 2, value, *places, cache, *table)

    def append_pair(key, value, k, v, *table):
        append(key, value, (k, v), *table)
        return k + 1, v + 1

    def appending(cache_of):
        def call(key, value, whole, *table):
            append(key, value, cache_of(whole), *table)
            return whole + 1

        return call

    whole = [key, value, torch.stack(caches, 1), *table]
    halves = appending(lambda whole: (whole[:, 0], whole[:, 1]))
    operators = "append_paged_kv_cache get_seq_lens get_batch_indices_positions"
    yield Call("append", operators, [key, value, *caches, *table], append_pair, (2, 3))
    yield Call("append_whole", operators, whole, appending(lambda whole: whole), (2,))
    yield Call("append_halves", operators, whole, halves, (2,))


@functools.cache
def calls_of(target) -> dict[str, Call]:
    kinds = (paged, ragged, single, other_wrappers, blocks, merges, masks, pages)
    return {call.name: call for kind in kinds for call in kind(target)}


NAMES = [
    "paged", "forward", "forward_lse", "whole_cache", "sinks_and_scale",
    "ragged", "lse", "into", "into_q", "into_lse",
    "single", "single_lse", "single_mask", "single_into", "single_decode",
    "decode", "sink_wrapper", "cascade", "blocks", "block_sizes",
    "merge_state", "merge_states", "in_place", "packbits", "segment_packbits",
    "append", "append_whole", "append_halves",
]  # fmt: skip


def as_list(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def assert_same(got, expected):
    got, expected = as_list(got), as_list(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(bits(a), bits(b))
