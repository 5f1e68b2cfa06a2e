"""trtllm_batch_context_with_kv_cache and the calls like it compute what the float64 oracle does."""

from __future__ import annotations

import copy
import dataclasses
import math
import types

import preflash
import pytest
import torch
from graph_replays import replayed
from preflash.testing import Case, MaskKind, Sinks, build, comparison, reference, runner
from wrapper_options import block_table

CONTEXT = Case(
    "context", (9, 1, 33), (30, 77, 40), 4, 2, 64, dtype=torch.float16, mask=MaskKind.CAUSAL,
    page_size=16, layout="HND",
)  # fmt: skip
DECODE = dataclasses.replace(CONTEXT, name="decode", qo_lens=(1, 1, 1))
SHORT = dataclasses.replace(CONTEXT, name="short", qo_lens=(3, 3, 3))
# A thread of the GPU sets the lengths of each: more than one CTA of them.
MANY = dataclasses.replace(
    DECODE, name="many", qo_lens=(1,) * 150, kv_lens=tuple(7 * i % 78 for i in range(150))
)
DRAFTS = dataclasses.replace(
    CONTEXT, name="drafts", qo_lens=(4, 4, 4), kv_lens=(30, 77, 2), mask=MaskKind.CUSTOM
)
NO_MASK = dataclasses.replace(CONTEXT, mask=MaskKind.NONE)
VARLEN = dataclasses.replace(CONTEXT, name="varlen", page_size=0, layout="NHD")


def arrays(inputs, device) -> dict[str, torch.Tensor]:
    """Returns block tables and lengths on a device; `device` may be a dict of them already."""
    if isinstance(device, dict):
        return device
    kv_lens = torch.tensor(inputs.case.kv_lens, dtype=torch.int32)
    table = block_table(inputs, unused=10**6)
    return {"block_tables": table.to(device), "seq_lens": kv_lens.to(device)}


def pools_of(inputs) -> tuple:
    return inputs.cache if isinstance(inputs.cache, tuple) else inputs.cache.unbind(1)


def common(inputs, target, on) -> dict:
    """Returns the arguments that calls of pages share; `on` is as in arrays()."""
    own = {"window_left": inputs.case.window_left, "backend": target.backend}
    return {**own, "workspace_buffer": runner.workspace(target.device), **arrays(inputs, on)}


def ends_of_rows(inputs, on) -> torch.Tensor:
    return inputs.qo_indptr if isinstance(on, dict) else inputs.qo_indptr.to(on)


def context(inputs, target, on="cpu", **options):
    case = inputs.case
    own = {
        "kv_cache": inputs.cache, "max_q_len": max(case.qo_lens),
        "max_kv_len": max(case.kv_lens) + 5, "bmm1_scale": case.scale, "bmm2_scale": 1.0,
        "batch_size": case.batch_size, "cum_seq_lens_q": ends_of_rows(inputs, on),
        "cum_seq_lens_kv": None, "kv_layout": case.layout,
        "causal": case.mask is MaskKind.CAUSAL,
        "sinks": None if inputs.sinks is None else [inputs.sinks], **common(inputs, target, on),
    }  # fmt: skip
    return preflash.trtllm_batch_context_with_kv_cache(inputs.q, **{**own, **options})


def decode(inputs, target, on="cpu", **options):
    case = inputs.case
    own = {
        "kv_cache": inputs.cache, "max_seq_len": max(case.kv_lens), "bmm1_scale": case.scale,
        "kv_layout": case.layout, "q_len_per_req": max(case.qo_lens), "sinks": inputs.sinks,
        **common(inputs, target, on),
    }  # fmt: skip
    return preflash.trtllm_batch_decode_with_kv_cache(inputs.q, **{**own, **options})


def decode_of_rows(inputs, target, on="cpu", **options):
    rows = {"max_q_len": max(inputs.case.qo_lens), "cum_seq_lens_q": ends_of_rows(inputs, on)}
    return decode(inputs, target, on, **{**rows, "q_len_per_req": None, **options})


def cudnn_decode(inputs, target, on="cpu", **options):
    case, (k, v) = inputs.case, pools_of(inputs)
    own = common(inputs, target, on)
    own["actual_seq_lens_kv"] = own.pop("seq_lens")
    own |= {
        "k_cache": k, "v_cache": v, "scale": case.scale, "max_sequence_kv": max(case.kv_lens),
        "q_len_per_req": max(case.qo_lens), "sinks": inputs.sinks,
    }  # fmt: skip
    return preflash.cudnn_batch_decode_with_kv_cache(inputs.q, **{**own, **options})


def varlen(inputs, target, on="cpu", **options):
    case = inputs.case
    own = {
        "k": inputs.k, "v": inputs.v, "qo_segment_offsets": inputs.qo_indptr.to(on),
        "kv_segment_offsets": inputs.kv_indptr.to(on), "causal": case.mask is MaskKind.CAUSAL,
        "sm_scale": case.scale, "backend": target.backend,
    }  # fmt: skip
    return preflash.fmha_varlen(inputs.q, **{**own, **options})


def places(target) -> list[str]:
    return ["cpu"] if target.device == "cpu" else ["cpu", target.device]


def check(inputs, result) -> None:
    runner.compare(inputs, *(result if isinstance(result, tuple) else (result, None))).check()


OPTIONS = {
    "plain": {},
    "NHD": {"layout": "NHD", "page_size": 8},
    "window and sinks": {"window_left": 7, "sinks": Sinks.MIXED},
    "wide q": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
}
# A call, its case, and the options that it is made with.
CALLS = {
    "context": (context, CONTEXT, OPTIONS),
    "decode": (decode, DECODE, OPTIONS),
    "cudnn": (cudnn_decode, DECODE, OPTIONS),
    "decode of three": (decode, SHORT, ["plain"]),
    "cudnn of three": (cudnn_decode, SHORT, ["plain"]),
    "decode of rows": (decode_of_rows, CONTEXT, ["plain", "window and sinks"]),
    "context without a mask": (context, NO_MASK, ["plain"]),
    "decode of many": (decode, MANY, ["plain"]),
}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in CALLS for option in CALLS[name][2]]
)
def test_calls(target, name, option):
    attend, case, _ = CALLS[name]
    case = dataclasses.replace(case, **OPTIONS[option])
    if attend is cudnn_decode:
        case = dataclasses.replace(case, layout="HND")
    inputs = build(case, device=target.device)
    for place in places(target):
        check(inputs, attend(inputs, target, place, return_lse=True))
        out = comparison.poison(inputs.q.shape, case.dtype, inputs.q.device)
        lse = comparison.poison(inputs.q.shape[:2], torch.float32, inputs.q.device)
        assert attend(inputs, target, place, out=out, lse=lse) is out
        check(inputs, (out, lse))


def test_calls_by_position(target):
    """The first arguments are in FlashInfer's order."""
    inputs = build(DECODE, device=target.device)
    work, table = runner.workspace(target.device), block_table(inputs, unused=10**6)
    lens, (k, v) = torch.tensor(DECODE.kv_lens, dtype=torch.int32), pools_of(inputs)
    q, scale = inputs.q, DECODE.scale
    tail = (-1, None, None, None, None)
    by_position = preflash.trtllm_batch_decode_with_kv_cache(
        q, inputs.cache, work, table, lens, 77, scale, 0.5, *tail, None, "HND"
    )
    check(inputs, by_position * 2)  # exact: bmm2_scale is 0.5
    by_position = preflash.trtllm_batch_context_with_kv_cache(
        q, inputs.cache, work, table, lens, 1, 77, scale, 0.5, 3, inputs.qo_indptr,
        inputs.kv_indptr, *tail, "HND",
    )  # fmt: skip
    check(inputs, by_position * 2)  # exact: bmm2_scale is 0.5
    by_position = preflash.cudnn_batch_decode_with_kv_cache(
        q, k, v, scale, work, max_sequence_kv=77, actual_seq_lens_kv=lens, block_tables=table
    )
    check(inputs, by_position)
    inputs = build(VARLEN, device=target.device)
    operands = (inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr)
    tail = (None, 33, None, None, True, VARLEN.scale, *(None,) * 4, True)
    check(inputs, preflash.fmha_varlen(*operands, *tail))


def test_scales(target):
    inputs = build(DECODE, device=target.device)
    expected = decode(inputs, target, bmm2_scale=0.5)
    log2 = torch.tensor([DECODE.scale * math.log2(math.e)], dtype=torch.float64)
    same = decode(inputs, target, bmm1_scale=3.0, bmm1_scale_log2=log2, bmm2_scale=0.5)
    torch.testing.assert_close(same, expected)
    # Callers divide bmm2_scale by o_scale, and multiply the output by it.
    wanted = decode(inputs, target, bmm2_scale=0.5, out_dtype=torch.float8_e4m3fn)
    for eight in (torch.float8_e4m3fn, "fp8"):
        out = decode(inputs, target, bmm2_scale=0.5, o_scale=2.0, out_dtype=eight)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    back = (out.float() * 2.0).to(DECODE.dtype)
    # Half a step of e4m3: 2^-4 of a number, 2^-10 below 2^-6, times o_scale; and that of 16 bits.
    torch.testing.assert_close(back, decode(inputs, target), rtol=0.065, atol=0.0022)


def test_one_cache_for_keys_and_values(target):
    inputs = build(DECODE, device=target.device)
    k, _ = pools_of(inputs)
    one = decode(inputs, target, kv_cache=k[:, None])
    assert torch.equal(one, decode(inputs, target, kv_cache=(k, k)))


ELEMENTS = torch.arange(4) * 4 * 64  # offsets of the rows of DECODE
# A word of 32 bits for each query: causal.
CAUSAL = torch.tensor([1, 3, 7]).repeat(3, 1).to(torch.int32)[..., None].view(torch.uint16)
LENS = torch.tensor(DECODE.kv_lens)
# A call, its case, and options that change nothing.
SAME = [
    (cudnn_decode, DECODE, {"actual_seq_lens_kv": LENS}),
    (cudnn_decode, DECODE, {"actual_seq_lens_kv": LENS.int()[:, None, None, None]}),
    (cudnn_decode, DECODE, {"batch_offsets_q": ELEMENTS, "batch_offsets_o": ELEMENTS[:3]}),
    (decode, DECODE, {"seq_lens": LENS.to(torch.uint32)}),
    (decode, SHORT, {"mask": CAUSAL}),
    (decode, SHORT, {"mask": CAUSAL.view(torch.uint32)}),
]


@pytest.mark.parametrize(("attend", "case", "options"), SAME)
def test_other_forms_of_an_argument(target, attend, case, options):
    inputs = build(case, device=target.device)
    expected = attend(inputs, target)
    assert torch.equal(attend(inputs, target, **options), expected)
    if options.get("mask") is CAUSAL:  # which may be on the device too
        assert torch.equal(attend(inputs, target, mask=CAUSAL.to(target.device)), expected)


def test_offsets_follow_strides(target):
    inputs = build(DECODE, device=target.device)
    expected = cudnn_decode(inputs, target)
    wide = torch.empty(3, 4, 128, dtype=DECODE.dtype, device=target.device)[..., :64]
    cudnn_decode(inputs, target, out=wide, batch_offsets_o=ELEMENTS * 2)
    assert torch.equal(wide, expected)
    with pytest.raises(ValueError, match="512 elements from row to row"):
        cudnn_decode(inputs, target, out=wide, batch_offsets_o=ELEMENTS)
    # The stride of one row says nothing.
    one = build(dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(30,)), device=target.device)
    expected = cudnn_decode(one, target)
    one.q = one.q.as_strided(one.q.shape, (10**4, 64, 1))
    assert torch.equal(cudnn_decode(one, target, batch_offsets_q=ELEMENTS[:2]), expected)


FULL = torch.ones(3, 4, 4, dtype=torch.bool)
TREES = {
    "full": FULL,
    "a tree with its root": FULL.tril() & ~torch.eye(4, dtype=torch.bool).roll(-1, 1),
    "no draft": ~FULL,
    "random": torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(5)) < 0.5,
}


def words_of(tree: torch.Tensor) -> torch.Tensor:
    """Returns the mask argument for a tree: a bit for each draft that a query keeps."""
    words = (tree.to(torch.int32) << torch.arange(tree.shape[-1])).sum(-1, dtype=torch.int32)
    return words[..., None].view(torch.uint16)


@pytest.mark.parametrize(
    ("tree", "option"),
    [*((tree, "plain") for tree in TREES), *(("random", option) for option in list(OPTIONS)[1:])],
)
def test_draft_trees(target, tree, option):
    case, tree = dataclasses.replace(DRAFTS, **OPTIONS[option]), TREES[tree]
    inputs, words = build(case, device=target.device), words_of(tree)
    inputs.masks = []
    for kept, kv_len in zip(tree, case.kv_lens, strict=True):
        mask = torch.ones(4, kv_len, dtype=torch.bool)
        mask[:, max(kv_len - 4, 0) :] = kept[:, max(4 - kv_len, 0) :]
        inputs.masks.append(target.to(mask))
    for place in places(target):
        check(inputs, decode(inputs, target, place, mask=words.to(place), return_lse=True))
        out = comparison.poison(inputs.q.shape, case.dtype, inputs.q.device)
        assert decode(inputs, target, place, mask=words, out=out) is out
        check(inputs, out)


def two_tables(inputs, first: int) -> torch.Tensor:
    """Returns tables of K and of V pages that alternate in one pool, as in TensorRT-LLM."""
    table = block_table(inputs, unused=10**6)
    tables = torch.stack([2 * table + first, 2 * table + 1 - first], dim=1)
    tables[tables > 10**6] = 7 - first  # unused entries
    return tables


@pytest.mark.parametrize("first", [0, 1], ids=["k first", "v first"])
@pytest.mark.parametrize("call", [context, decode])
def test_tables_of_k_and_of_v(target, call, first):
    inputs = build(CONTEXT if call is context else DECODE, device=target.device)
    pools = pools_of(inputs)
    pool = torch.stack(pools if first == 0 else pools[::-1], dim=1).flatten(0, 1)
    given = {"uses_shared_paged_kv_idx": False, "kv_cache": (pool, pool), "return_lse": True}
    tables = two_tables(inputs, first)
    for place in places(target):
        check(inputs, call(inputs, target, place, **given, block_tables=tables.to(place)))
    tables[0, 1, 0] += 2
    with pytest.raises(NotImplementedError, match="takes several values"):
        call(inputs, target, **given, block_tables=tables)


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.NONE])
def test_fmha_varlen(target, mask):
    inputs = build(dataclasses.replace(VARLEN, mask=mask), device=target.device)
    for place in places(target):
        for options in ({"return_lse": True}, {"return_lse": True, "max_qo_len": 33}, {}):
            result = varlen(inputs, target, place, **options)
            assert (result[1] is None) == (not options)
            check(inputs, result)
    scales = {"sm_scale": inputs.case.scale / 6.0, "q_scale": 2.0, "k_scale": 3.0, "v_scale": 1.0}
    scaled, _ = varlen(inputs, target, **scales)
    comparison.compare(scaled, None, reference(inputs), logit_rounding=48.0).check()


def lengths_beyond(number: int):
    return lambda i: {"seq_lens": torch.tensor(i.case.kv_lens) + number}


def freed(cache):
    cache.untyped_storage().resize_(0)
    return {"kv_cache": cache}


FORM = r"mask is .*\[batch_size, q_len_per_req, words\]"
# A call and its case, an error, and options (or a function of the inputs that makes them) with a
# piece of each message.
REFUSED = [
    (context, CONTEXT, NotImplementedError, [
        *(({name: value}, name) for name, value in (
            ("out_dtype", "nvfp4"), ("use_fp16_softmax", True), ("kv_cache_sf", torch.ones(1)),
        )),
    ]),
    (context, NO_MASK, NotImplementedError, [({"window_left": 3}, "window_left=3")]),
    (context, CONTEXT, ValueError, [
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx"),
        ({"kv_layout": "other"}, "kv_layout"),
        (lambda i: {"block_tables": two_tables(i, 0)}, r"must be \[batch_size, pages\] with"),
    ]),
    (context, CONTEXT, TypeError, [({"cum_seq_lens_kv": "none"}, "cum_seq_lens_kv")]),
    (decode, DECODE, NotImplementedError, [
        ({"o_sf_scale": 1.0}, "o_sf_scale"),
        ({"cp_world": 2}, "cp_world"),
    ]),
    (decode, DECODE, ValueError, [
        ({"mask": torch.ones(1)}, "mask is"),
        ({"max_seq_len": 3}, "max_seq_len"),
        ({"q_len_per_req": 2}, "query has 3 rows"),
        ({"backend": "trtllm-gen"}, "trtllm-gen"),
        (lambda i: {"cum_seq_lens_q": i.qo_indptr, "q_len_per_req": None}, "max_q_len=None"),
        ({"o_scale": 2.0}, "o_scale=2"),
        (lambda i: freed(pools_of(i)[0][:, None].clone()), "^kv_cache has no memory behind it"),
        (lambda i: {**freed(torch.stack(pools_of(i), 1)), "uses_shared_paged_kv_idx": False,
                    "block_tables": two_tables(i, 0)}, "^kv_cache has no memory behind it"),
        (lambda i: {"lse": (lse := i.q[..., 0].float()), "workspace_buffer": lse.flatten()},
         "lse shares memory with workspace_buffer"),
        (lengths_beyond(2**32), "max_seq_len|negative"),
        (lengths_beyond(-(2**32)), "max_seq_len|negative"),
        (lambda i: {"block_tables": two_tables(i, 0)}, r"must be \[batch_size, pages\] with"),
    ]),
    (decode, DECODE, TypeError, [
        (lambda i: {"kv_cache": (*pools_of(i), i.q)},
         "kv_cache must be a tensor or a tuple of two"),
    ]),
    (decode, SHORT, ValueError, [
        *(({"mask": m}, FORM) for m in (CAUSAL[:2], CAUSAL[:, :2], CAUSAL[0], CAUSAL.float())),
        ({"mask": CAUSAL[..., :0]}, "mask has 0 bits for each query"),
    ]),
    (decode_of_rows, SHORT, NotImplementedError, [({"mask": CAUSAL}, "mask with cum_seq_lens_q")]),
    (cudnn_decode, DECODE, NotImplementedError, [
        ({"batch_offsets_k": torch.ones(1)}, "batch_offsets_k"),
    ]),
    (cudnn_decode, DECODE, ValueError, [
        ({"max_sequence_kv": 3}, "max_sequence_kv"),
        ({"batch_offsets_o": ELEMENTS * 2}, "batch_offsets_o: requests must"),
        (lambda i: {"k_cache": pools_of(i)[0][..., :32]},
         "^q, k_cache, v_cache: k_cache has head_dim 32"),
    ]),
    (cudnn_decode, DECODE, TypeError, [
        ({"actual_seq_lens_kv": None}, "actual_seq_lens_kv"),
        ({"batch_offsets_q": ELEMENTS.float()}, r"batch_offsets_q is torch\.float32"),
        ({"k_cache": None}, "^k_cache must be a torch"),
    ]),
    (varlen, VARLEN, NotImplementedError, [
        ({"plan_info": [torch.ones(1)]}, "plan_info"),
        ({"o_scale": 2.0}, "o_scale"),
    ]),
    (varlen, VARLEN, ValueError, [
        ({"max_qo_len": 3}, "max_qo_len=3"),
        (lambda i: {"kv_segment_offsets": i.kv_indptr[:-1]}, "kv_segment_offsets"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("attend", "case", "error", "options", "match"),
    [
        pytest.param(attend, case, error, *row, id=f"{attend.__name__} {row[1]}")
        for attend, case, error, rows in REFUSED
        for row in rows
    ],
)
def test_refusals(target, attend, case, error, options, match):
    inputs = build(case, device=target.device)
    out = comparison.poison(inputs.q.shape, inputs.q.dtype, inputs.q.device)
    before = out.clone()
    options = options(inputs) if callable(options) else options
    with pytest.raises(error, match=match):
        attend(inputs, target, out=out, **options)
    assert torch.equal(out.view(torch.int16), before.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("name", list(CALLS)[:5])
def test_a_graph_replays_other_lengths(name, backend):
    attend, case, _ = CALLS[name]
    target = types.SimpleNamespace(device="cuda", backend=backend)
    inputs = build(case, device="cuda")
    kv_lens = tuple(reversed(case.kv_lens))
    other = build(dataclasses.replace(case, kv_lens=kv_lens), device="cuda")
    kept, expected = arrays(inputs, "cuda"), copy.copy(inputs)
    inputs.qo_indptr = inputs.qo_indptr.to("cuda")
    graph, result = replayed(lambda: attend(inputs, target, kept, return_lse=True))
    check(expected, result)
    for name, value in arrays(other, "cuda").items():
        kept[name].copy_(value)
    inputs.q.copy_(other.q)
    for mine, theirs in zip(inputs.cache, other.cache, strict=True):
        mine.copy_(theirs)
    graph.replay()
    check(other, result)
