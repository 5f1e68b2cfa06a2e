"""Calls of this package in a form that torch.compile can be given: a function, and tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import preflash
import torch
from fuzz.guarded import bits
from preflash.testing import Case, KvForm, build, runner

PAGED = Case("paged", (33, 5, 0), (40, 90, 7), 4, 2, 64, page_size=4)
WHOLE = dataclasses.replace(PAGED, name="whole", form=KvForm.COMBINED)
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64)
ONE = Case("one", (33,), (40,), 4, 2, 64)
DECODE = Case("decode", (1, 1, 1), (40, 90, 7), 4, 2, 64, page_size=4)


@dataclasses.dataclass
class Call:
    function: Callable[..., Any]
    tensors: list[torch.Tensor]
    operators: set[str]  # what a graph of it holds
    written: tuple[int, ...] = ()  # which tensors it writes
    owner: Any = None  # a wrapper

    def fresh(self) -> list[torch.Tensor]:
        """The tensors, and copies of those that are written."""
        return [t.clone() if i in self.written else t for i, t in enumerate(self.tensors)]


def planned(case: Case, target, buffer=None):
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device, buffer=buffer)
    runner.plan(wrapper, inputs)
    return wrapper, inputs


def paged(target) -> Iterator[tuple[str, Call]]:
    wrapper, inputs = planned(PAGED, target)
    qkv = [inputs.q, *inputs.cache]
    yield "paged", Call(lambda q, k, v: wrapper.run(q, (k, v)), qkv, {"run"}, owner=wrapper)
    yield (
        "window",
        Call(
            lambda q, k, v: wrapper.run(q, (k, v), window_left=9, v_scale=0.5, q_scale=2),
            qkv,
            {"run"},
        ),
    )
    forward = Call(
        lambda q, k, v: wrapper.forward(q, (k, v), causal=True, sm_scale=0.3, logits_soft_cap=9),
        qkv,
        {"forward"},
    )
    yield "forward", forward
    yield (
        "forward_lse",
        Call(
            lambda q, k, v: wrapper.forward_return_lse(q, (k, v), window_left=7),
            qkv,
            {"forward_return_lse"},
        ),
    )
    whole, inputs_whole = planned(WHOLE, target)
    cache = [inputs_whole.q, inputs_whole.cache]
    yield "whole_cache", Call(lambda q, kv: whole.run(q, kv), cache, {"run"}, owner=whole)
    sinks = target.to(torch.tensor([0.5, -1.0, 2.0, -torch.inf]))
    yield (
        "sinks_and_scale",
        Call(
            lambda q, kv, sinks, scale: whole.run(q, kv, sinks=sinks, k_scale=scale),
            [*cache, sinks, torch.tensor([0.7])],
            {"run"},
        ),
    )


def ragged(target) -> Iterator[tuple[str, Call]]:
    wrapper, inputs = planned(RAGGED, target)
    qkv = [inputs.q, inputs.k, inputs.v]
    out, lse = torch.empty_like(inputs.q), inputs.q.new_empty(4, 38, dtype=torch.float32)

    def into_both(q, k, v, out, lse):
        options = {"lse_layout": "HN", "lse_base": "ln"}
        given = wrapper.run(q, k, v, out=out, lse=lse, return_lse=True, **options)
        assert given[0] is out
        return (*given, out + 1)

    def into_q(q, k, v):
        packed = q * 1
        wrapper.run(packed, k, v, out=packed)
        return packed

    yield "lse", Call(lambda q, k, v: wrapper.run_return_lse(q, k, v), qkv, {"run_return_lse"})
    yield (
        "lse_layout",
        Call(
            lambda q, k, v: wrapper.run(q, k, v, True, lse_layout="HN", lse_base="ln"),
            qkv,
            {"run_return_lse"},
        ),
    )
    yield "into", Call(into_both, [*qkv, out, lse], {"run_into"}, (3, 4))
    yield "into_q", Call(into_q, qkv, {"run_into"})
    yield (
        "into_out",
        Call(lambda q, k, v, out: wrapper.run(q, k, v, out=out), [*qkv, out], {"run_into"}, (3,)),
    )
    yield (
        "into_lse",
        Call(
            lambda q, k, v, lse: (wrapper.run(q, k, v, lse=lse, lse_layout="HN"), lse * 1),
            [*qkv, lse],
            {"run_into"},
            (3,),
        ),
    )


def single(target) -> Iterator[tuple[str, Call]]:
    inputs = build(ONE, device=target.device)
    qkv = [inputs.q, inputs.k[:40], inputs.v[:40]]
    mask = target.to(torch.rand(33, 40, generator=torch.Generator().manual_seed(0)) < 0.7)
    out = torch.empty_like(inputs.q)

    def one(*args, **options):
        return preflash.single_prefill_with_kv_cache(*args, **options)

    backend = {"backend": target.backend}
    yield "single", Call(lambda q, k, v: one(q, k, v, causal=True, **backend), qkv, {"single"})
    yield (
        "single_lse",
        Call(
            lambda q, k, v: one(q, k, v, return_lse=True, sm_scale=0.2, window_left=8, **backend),
            qkv,
            {"single_return_lse"},
        ),
    )
    yield (
        "single_mask",
        Call(lambda q, k, v, mask: one(q, k, v, mask, **backend), [*qkv, mask], {"single"}),
    )
    yield (
        "single_into",
        Call(
            lambda q, k, v, out: one(q, k, v, out=out, **backend),
            [*qkv, out],
            {"single_into"},
            (3,),
        ),
    )
    yield (
        "single_decode",
        Call(
            lambda q, k, v: preflash.single_decode_with_kv_cache(q[0], k, v, return_lse=True),
            qkv,
            {"single_return_lse"},
        ),
    )


def other_wrappers(target) -> Iterator[tuple[str, Call]]:
    inputs = build(DECODE, device=target.device)
    q, cache = inputs.q, inputs.cache
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    heads = (DECODE.num_qo_heads, DECODE.num_kv_heads, DECODE.head_dim, DECODE.page_size)
    dtypes = {"q_data_type": DECODE.dtype, "kv_data_type": DECODE.dtype}
    buffer = runner.workspace(target.device)
    decode = preflash.BatchDecodeWithPagedKVCacheWrapper(buffer, backend=target.backend)
    decode.plan(*table, *heads, **dtypes)
    yield "decode", Call(lambda q, k, v: decode.run(q, (k, v)), [q, *cache], {"run"})
    sinks = target.to(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    sink = preflash.BatchAttentionWithAttentionSinkWrapper(
        buffer, backend=target.backend, head_dim_qk=64, head_dim_vo=64
    )
    sink.plan(inputs.qo_indptr, *table, *heads, **dtypes)
    yield (
        "sink_wrapper",
        Call(lambda q, k, v, s: sink.run(q, (k, v), s, 0.25), [q, *cache, sinks], {"run"}),
    )
    cascade = preflash.MultiLevelCascadeAttentionWrapper(2, buffer)
    cascade.plan([inputs.qo_indptr] * 2, *([array] * 2 for array in table), *heads, **dtypes)
    yield (
        "cascade",
        Call(
            lambda q, k, v: cascade.run(q.float().to(q.dtype), (k, v)),
            [q, *cache],
            {"run_return_lse", "merge_state_in_place"},
        ),
    )


def blocks(target) -> Iterator[tuple[str, Call]]:
    inputs = build(ONE, device=target.device)
    q, k, v = inputs.q[:32], inputs.k[:40], inputs.v[:40]
    buffer = runner.workspace(target.device)
    blocks = preflash.BlockSparseAttentionWrapper(buffer, target.backend)
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 4])
    blocks.plan(
        indptr, indices, 32, 40, 16, 8, 4, 2, 64, q_data_type=ONE.dtype, o_data_type=torch.float32
    )
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    yield (
        "blocks",
        Call(
            lambda *t: blocks.run(*t[:3], out=t[3], return_lse=True),
            [q, k, v, out],
            {"run_return_lse"},
            (3,),
        ),
    )
    sizes = preflash.VariableBlockSparseAttentionWrapper(buffer, target.backend)
    kept = torch.tensor([[[1, 0], [1, 1]], [[0, 0], [0, 1]]])
    rows, columns = torch.tensor([[10, 22]] * 2), torch.tensor([[16, 24], [40, 0]])
    sizes.plan(kept, rows, columns, 4, 2, 64, q_data_type=ONE.dtype)
    by_head = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    yield "block_sizes", Call(lambda q, k, v: sizes.run(q, k, v), by_head, {"run"})


def merges(target) -> Iterator[tuple[str, Call]]:
    generator = torch.Generator().manual_seed(0)
    v = target.to(torch.randn(9, 2, 3, 16, generator=generator))
    s = target.to(torch.randn(9, 2, 3, generator=generator))
    halves = [v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1], s[:, 1]]
    mask = target.to(torch.arange(9) % 2 == 0)

    def in_place(own_v, own_s, v, s, mask):
        preflash.merge_state_in_place(own_v, own_s, v, s, mask)
        return own_v * 2, own_s * 2

    yield "merge_state", Call(lambda *t: preflash.merge_state(*t), halves, {"merge_state"})
    yield "merge_states", Call(lambda v, s: preflash.merge_states(v, s), [v, s], {"merge_states"})
    yield "in_place", Call(in_place, [*halves, mask], {"merge_state_in_place"}, (0, 1))


def masks(target) -> Iterator[tuple[str, Call]]:
    bits = target.to(torch.rand(37, generator=torch.Generator().manual_seed(0)) < 0.5)
    yield "packbits", Call(lambda x: preflash.packbits(x, bitorder="little"), [bits], {"packbits"})
    indptr = torch.tensor([0, 9, 9, 37])
    yield (
        "segment_packbits",
        Call(
            lambda x, indptr: preflash.segment_packbits(x, indptr),
            [bits, indptr],
            {"segment_packbits"},
        ),
    )


def pages(target) -> Iterator[tuple[str, Call]]:
    generator = torch.Generator().manual_seed(0)
    indptr, last = target.to(torch.tensor([0, 2, 3]).int()), target.to(torch.tensor([2, 3]).int())
    indices = target.to(torch.tensor([4, 1, 2]).int())
    appended = target.to(torch.tensor([0, 3, 4]).int())
    yield (
        "seq_lens",
        Call(lambda *t: preflash.get_seq_lens(*t, 4), [indptr, last], {"get_seq_lens"}),
    )
    lengths = target.to(torch.tensor([6, 3]).int())
    yield (
        "positions",
        Call(
            lambda *t: preflash.get_batch_indices_positions(*t, 6),
            [appended, lengths],
            {"get_batch_indices_positions"},
        ),
    )
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

    def append_halves(key, value, whole, *table):
        append(key, value, (whole[:, 0], whole[:, 1]), *table)
        return whole + 1

    def append_whole(key, value, whole, *table):
        append(key, value, whole, *table)
        return whole + 1

    table = [indices, indptr, last]
    operators = {"append_paged_kv_cache", "get_seq_lens", "get_batch_indices_positions"}
    whole = torch.stack(caches, 1)
    yield "append", Call(append_pair, [key, value, *caches, *table], operators, (2, 3))
    yield "append_whole", Call(append_whole, [key, value, whole, *table], operators, (2,))
    yield "append_halves", Call(append_halves, [key, value, whole, *table], operators, (2,))


@functools.cache
def calls_of(target) -> dict[str, Call]:
    """By name; made once."""
    kinds = (paged, ragged, single, other_wrappers, blocks, merges, masks, pages)
    return {name: call for kind in kinds for name, call in kind(target)}


# Every one of them.
NAMES = [
    "paged", "window", "forward", "forward_lse", "whole_cache", "sinks_and_scale",
    "lse", "lse_layout", "into", "into_q", "into_out", "into_lse",
    "single", "single_lse", "single_mask", "single_into", "single_decode",
    "decode", "sink_wrapper", "cascade", "blocks", "block_sizes",
    "merge_state", "merge_states", "in_place",
    "packbits", "segment_packbits",
    "seq_lens", "positions", "append", "append_whole", "append_halves",
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
