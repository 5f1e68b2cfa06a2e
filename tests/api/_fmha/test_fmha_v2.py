"""trtllm_fmha_v2_prefill computes what the float64 oracle does, over its options."""

import dataclasses
import math

import preflash
import prepass_policy
import pytest
import torch
from fuzz.fmha_problems import (
    E4M3,
    LAYOUTS,
    FmhaCase,
    Pools,
    build,
    compare_out,
    draw,
    judge,
    run,
)
from fuzz.random_cases import Limits
from graph_replays import replayed
from preflash.testing import comparison

attention = preflash.trtllm_fmha_v2_prefill
CASE = FmhaCase((33, 5, 0, 70), (40, 90, 7, 70), stats=True)
LENGTHS = ["host", "device"]


def changed(**changes) -> FmhaCase:
    case = dataclasses.replace(CASE, **changes)
    if case.layout == "PACKED_QKV":
        case = dataclasses.replace(case, kv_lens=case.qo_lens, num_kv_heads=case.num_heads)
    return case


def verify(case: FmhaCase, target):
    inputs = build(case, target.device)
    result = run(inputs, target.backend)
    assert judge(inputs, result).failures == []
    return result


@pytest.mark.parametrize("seed", range(8))
def test_the_same_requests_in_another_order(target, seed):
    """On a GPU a plan for the longest requests serves both calls."""
    case = dataclasses.replace(draw(0, seed, Limits()), spare_length=40)
    order = {"qo_lens": case.qo_lens[::-1], "kv_lens": case.kv_lens[::-1]}
    for one in (case, dataclasses.replace(case, **order)):
        verify(one, target)


def test_a_plan_serves_its_own_sizes(target):
    """Each call differs in one size from the last with its max_q_len, or the last with pages."""
    for most, changes in (
        (None, {"qo_lens": (70, 38, 0), "kv_lens": (70, 47, 90)}),
        (None, {"qo_lens": (27,) * 4}), (None, {"kv_lens": (52, 52, 52, 51)}), (None, {}),
        (4096, {"qo_lens": (9,) * 4}), (4096, {"kv_lens": (9,) * 4}), (4096, {}),
        (None, {"layout": "Q_PAGED_KV_NHD", "page_size": 32, "kv_lens": (96, 64, 64, 64)}),
        (None, {"layout": "Q_PAGED_KV_NHD", "kv_lens": (96, 16, 16, 16)}),
    ):  # fmt: skip
        inputs = build(changed(head_dim=80, **changes), target.device)
        inputs.arguments |= {"max_q_len": most, "max_kv_len": most} if most else {}
        assert judge(inputs, run(inputs, target.backend)).failures == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_lengths_beyond_the_longest_are_cut_off(backend):
    """A request has its first max_q_len queries, and its first max_kv_len of the keys between its
    offsets: on a GPU no check reads the lengths."""
    inputs = build(changed(stats=False), "cuda")
    inputs.arguments["seq_lens"] += 100
    shorter = {"max_q_len": 50, "max_kv_len": 60, "backend": backend}
    out = inputs.of_requests(attention(**inputs.arguments | shorter)).cpu()
    inputs.requests = [(q[:50], k[:60], v[:60]) for q, k, v in inputs.requests]
    first_rows = torch.cat([rows[:50] for rows in out.split(CASE.qo_lens)])
    comparison.compare(first_rows, None, inputs.expected()).check()


def test_plans_for_the_longest_requests_have_no_copies(target):
    """A plan of upper bounds reads the operands, even where copies would fit the workspace."""
    case = changed(dtype=E4M3, out_dtype=torch.bfloat16, stats=False, spare_length=40)
    with prepass_policy.forced("always"):
        verify(case, target)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_table_of_fewer_pages_than_the_maximum(target, lengths):
    """Callers round max_kv_len up, or give the longest that their model has."""
    where = "cpu" if lengths == "host" else target.device
    for kv_lens in ((40, 90, 7, 70), (14, 90, 70, 70), (14, 32, 7, 70)):
        inputs = build(changed(layout="Q_PAGED_KV_HND", kv_lens=kv_lens), target.device, where)
        pages = -(-max(kv_lens) // CASE.page_size)
        inputs.arguments["block_tables"] = inputs.arguments["block_tables"][:, :pages]
        inputs.arguments["max_kv_len"] = 4096
        assert judge(inputs, run(inputs, target.backend)).failures == []


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("layout", ["Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"])
def test_tables_of_both_pools(target, layout, lengths):
    """The second table of [batch_size, 2, pages] counts v's pages from the beginning of k."""
    case = changed(layout=layout, pools=Pools.PAIR, dtype=torch.bfloat16, head_dim=128)
    inputs = build(case, target.device, "cpu" if lengths == "host" else target.device)
    q, *pools = inputs.arguments["qkv"]
    k, v = pools if len(pools) == 2 else pools[0]
    pages = k.shape[0]
    fused = torch.empty((2 * pages + 3, *k.shape[1:]), dtype=k.dtype, device=k.device)
    fused[:pages], fused[pages + 3 :] = k, v
    inputs.arguments["qkv"] = (q, (fused[:pages], fused[pages + 3 :]))
    table = inputs.arguments["block_tables"]
    both = torch.stack([table, table + pages + 3], dim=1)
    for request, kv_len in enumerate(case.kv_lens):  # unused entries
        both[request, :, -(-kv_len // case.page_size) :] = -1
    inputs.arguments["block_tables"] = both
    assert judge(inputs, run(inputs, target.backend)).failures == []
    half = fused.flatten()[pages * k[0].numel() + k[0].numel() // 2 :][: v.numel()].view(v.shape)
    wrong = {"block_tables": torch.stack([table, table + pages], dim=1)}
    for error, says, changes in (
        *[(ValueError, r"block_tables\[:, 1\] differs", wrong)] * both.is_cpu,
        (ValueError, "bytes behind k", {"qkv": (q, (fused[:pages], half))}),
        (ValueError, "of their own", {"qkv": (q, torch.stack([k, v], dim=1))}),
        (NotImplementedError, "k and v are one pool", {"qkv": (q, (k, k))}),
    ):
        with pytest.raises(error, match=says):
            attention(**inputs.arguments | changes, backend=target.backend)


@pytest.mark.parametrize("own_out", [False, True])
@pytest.mark.parametrize(
    ("out_dtype", "bmm2", "value"),
    [
        (torch.bfloat16, 40.0, 30000.0),
        (torch.bfloat16, -1e30, 2.0),
        (torch.bfloat16, 1e-30, 2.0),
        (E4M3, 1e-6, 30000.0),
        (E4M3, 1e3, 30000.0),
    ],
)
def test_scales_beyond_the_range_of_float16(target, out_dtype, bmm2, value, own_out):
    """A value that float16 queries cannot hold reaches an output of another dtype."""
    case = FmhaCase((8,), (8,), num_heads=2, out_dtype=out_dtype, bmm2=bmm2, brings_out=own_out)
    inputs = build(case, target.device)
    for operand, constant in zip(inputs.arguments["qkv"], (0.0, 1.0, value), strict=True):
        operand.fill_(constant)
    result = inputs.of_requests(attention(**inputs.arguments, backend=target.backend))
    expected = value * bmm2 if out_dtype == torch.bfloat16 else min(value * bmm2, 448.0)
    wanted = torch.full((8, 2, 64), expected, dtype=torch.float64)
    rtol = 2.0**-8 if out_dtype == torch.bfloat16 else 2.0**-4  # half a step of the output
    torch.testing.assert_close(result.cpu().double(), wanted, rtol=rtol, atol=0.0)


def test_an_empty_batch(target):
    arguments = build(CASE, target.device).arguments
    none = torch.zeros(0, dtype=torch.int32, device=target.device)
    zero = torch.zeros(1, dtype=torch.int32, device=target.device)
    empty = {"batch_size": 0, "seq_lens": none, "cum_seq_lens_q": zero, "cum_seq_lens_kv": zero}
    out, stats = attention(**arguments | empty, backend=target.backend)
    assert out.shape[0] == stats.shape[0] == arguments["qkv"][0].shape[0]
    assert bool((stats.cpu() == torch.tensor([-math.inf, 0.0])).all())  # maximum and sum of no key


def test_a_short_workspace_splits_less(target):
    """Split keys merge through the workspace; one of no bytes leaves them whole."""
    case = FmhaCase((1,), (5000,), num_heads=2, num_kv_heads=1, mask_mode="padding")
    for size in (0, 1 << 20):
        inputs = build(case, target.device, "cpu")
        inputs.arguments["workspace_buffer"] = torch.full(
            (size,), 255, dtype=torch.uint8, device=target.device
        )
        out = attention(**inputs.arguments, backend=target.backend)
        compare_out(inputs, out, inputs.expected()).check()


# _wrappers/test_skipping.py compares the tiles that this call leaves out with those of wrappers.
FACTOR = "skip_softmax_threshold_scale_factor"


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipping_of_8_bits(target, layout, out_dtype):
    """No GPU kernel skips tiles of 8 bits: operands become 16 bits, and pages are listed."""
    case = changed(layout=layout, dtype=E4M3, out_dtype=out_dtype, stats=False)
    for place in {"cpu", target.device}:
        inputs = build(case, target.device, place)
        result = attention(**inputs.arguments | {FACTOR: 1e-12}, backend=target.backend)
        assert result.dtype == (out_dtype or E4M3)
        compare_out(inputs, result, inputs.expected(), out_dtype).check()


@pytest.mark.parametrize("factor", [1e-3, 1e9])
@pytest.mark.parametrize("mode", ["causal", "sliding_window", "chunked", "padding"])
def test_weight_of_skipped_tiles_is_bounded(target, factor, mode):
    """A skipped tile has, in each row, at most min(f / kv_len, 1) of the largest weight, times
    its keys. One that raises a row's maximum stays, whatever the factor."""
    case = FmhaCase(
        (190, 1, 64), (600, 300, 64), head_dim=64, mask_mode=mode, window_left=150, chunk=256
    )
    inputs = build(case, target.device)
    out = attention(**inputs.arguments | {FACTOR: factor}, backend=target.backend)
    expected = inputs.expected()
    assert inputs.of_requests(out).isfinite().all()
    if factor < 1:
        compare_out(inputs, out, expected).check()
    values = max(float(v.abs().max()) for _, _, v in inputs.requests)
    assert float(inputs.of_requests(out).abs().max()) <= values * 1.01


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("layout", ["SEPARATE_Q_K_V", "Q_PAGED_KV_NHD"])
def test_a_graph_replays_other_lengths(backend, layout):
    """Lengths and pages are read on the device, and the host does not wait: a captured call
    computes what they hold then."""
    case = dataclasses.replace(CASE, layout=layout, stats=False)
    inputs = build(case, "cuda")
    other = build(
        dataclasses.replace(case, qo_lens=(5, 33, 70, 0), kv_lens=(90, 40, 70, 7)), "cuda"
    )
    graph, out = replayed(lambda: attention(**inputs.arguments, backend=backend))
    compare_out(inputs, out, inputs.expected()).check()
    for name in ("seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv", "block_tables"):
        if inputs.arguments[name] is not None:
            inputs.arguments[name].copy_(other.arguments[name])
    for mine, theirs in zip(inputs.arguments["qkv"], other.arguments["qkv"], strict=True):
        mine.copy_(theirs)
    graph.replay()
    compare_out(other, out, other.expected()).check()
