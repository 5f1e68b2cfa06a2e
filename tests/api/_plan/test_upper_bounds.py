"""With lengths_are_upper_bounds=True plan() reads upper bounds of the keys, run() their lengths."""

import dataclasses

import preflash
import pytest
import torch
from graph_stage import Limits, Stage, capture
from preflash.testing import Case, MaskKind, Sinks, build, runner
from preflash.testing.case import Position
from preflash.testing.inputs import as_nhd, pages_of
from preflash.testing.oracle import attend, concatenate

BOUNDS = (300, 90, 7, 0, 130)
# Every key, none, one, and a number in the middle of a tile and of a page.
RUNS = ((300, 90, 7, 0, 130), (0, 0, 0, 0, 0), (1, 33, 7, 0, 129), (129, 90, 2, 0, 64))
PAGED = Case("paged", (30, 5, 9, 2, 1), BOUNDS, 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
DECODE = dataclasses.replace(PAGED, name="decode", qo_lens=(1,) * 5, num_qo_heads=8)
FEW = dataclasses.replace(DECODE, name="few", qo_lens=(2, 2), kv_lens=(300, 1000), page_size=64)
CASES = {
    "paged": PAGED,
    "pages of 1": dataclasses.replace(PAGED, page_size=1),
    "ragged": RAGGED,
    "decode": DECODE,
    "few": FEW,
}
OPTIONS = {
    "plain": {},
    "full": {"mask": MaskKind.NONE},
    "window": {"window_left": 20},
    "soft cap": {"soft_cap": 5.0},
    "alibi": {"position": Position.ALIBI},
    "rope": {"position": Position.ROPE},
    "sinks": {"sinks": Sinks.MIXED},
    "chunks of 64": {"fixed_split_size": 64},
    "one chunk": {"disable_split_kv": True},
    "8-bit keys": {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn},
    "8 bits": {"dtype": torch.float8_e4m3fn},
    "(192, 128)": {"head_dim": 192, "head_dim_vo": 128},
    "head_dim 256": {"head_dim": 256},
}


def runs_of(case: Case) -> list[tuple[int, ...]]:
    if case.kv_lens == BOUNDS:
        return list(RUNS)
    return [case.kv_lens, (0, 517), (299, 2)]


def lens_of(inputs, kv_lens) -> torch.Tensor:
    return torch.tensor(kv_lens, dtype=torch.int32, device=inputs.q.device)


def bounded(inputs, target, **options):
    """Returns a wrapper planned for upper bounds, and the lengths that its runs read."""
    lens = lens_of(inputs, inputs.case.kv_lens)
    wrapper = runner.planned(
        inputs, backend=target.backend, seq_lens=lens, lengths_are_upper_bounds=True, **options
    )
    return wrapper, lens


def without_keys_after(inputs, kv_lens):
    """Returns the inputs with NaN in the keys after each request's current length."""
    case = inputs.case
    inputs = dataclasses.replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
    for i, (now, bound) in enumerate(zip(kv_lens, case.kv_lens, strict=True)):
        for t in (inputs.k, inputs.v):
            if case.paged:
                for j in range(now, bound):
                    page = inputs.page_table[i][j // case.page_size]
                    pages_of(t, case)[page, j % case.page_size] = float("nan")
            else:
                begin = sum(case.kv_lens[:i])
                as_nhd(t, case.layout)[begin + now : begin + bound] = float("nan")
    if case.paged:
        inputs.cache = (inputs.k, inputs.v)
    return inputs


def expected_of(inputs, kv_lens):
    parts = []
    for i, now in enumerate(kv_lens):
        one = inputs.request(i)
        parts.append(attend(one.q, one.k[:now], one.v[:now], inputs.pipeline))
    return concatenate(parts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers_of_keys_at_the_time_of_a_run(target, case, options):
    inputs = build(dataclasses.replace(case, **options), device=target.device)
    wrapper, lens = bounded(inputs, target)
    for kv_lens in runs_of(inputs.case):
        lens.copy_(lens_of(inputs, kv_lens))
        given = without_keys_after(inputs, kv_lens)
        out, lse = runner.run(wrapper, given)
        runner.compare(given, out, lse, expected_of(inputs, kv_lens)).check()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_bounds_as_lengths_are_an_ordinary_plan(target, case):
    """The same bits; numbers outside of [0, bound] are clamped."""
    inputs = build(case, device=target.device)
    wrapper, lens = bounded(inputs, target, disable_split_kv=True)
    exact = runner.planned(inputs, backend=target.backend, disable_split_kv=True)
    expected = runner.run(exact, inputs)
    for more in (0, 5, 10**9):
        lens.copy_(lens_of(inputs, case.kv_lens) + more)
        for got, wanted in zip(runner.run(wrapper, inputs), expected, strict=True):
            assert torch.equal(got, wanted)
    lens.fill_(-3)
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse, expected_of(inputs, [0] * case.batch_size)).check()


@pytest.mark.parametrize("case", [PAGED, RAGGED, FEW], ids=lambda case: case.name)
def test_options_of_a_run(target, case):
    inputs = build(case, device=target.device)
    wrapper, lens = bounded(inputs, target)
    kv_lens = runs_of(case)[-1]
    lens.copy_(lens_of(inputs, kv_lens))
    sinks = torch.linspace(-1, 1, case.num_qo_heads, device=target.device)
    for changes, run_options in (
        ({"window_left": 9}, {"window_left": 9}),
        ({}, {"sinks": sinks}),
        ({"window_left": 70}, {"window_left": 70, "sinks": sinks}),
    ):
        given = dataclasses.replace(inputs, case=dataclasses.replace(case, **changes))
        given.sinks = run_options.get("sinks")
        out, lse = runner.run(wrapper, dataclasses.replace(inputs, sinks=None), **run_options)
        runner.compare(given, out, lse, expected_of(given, kv_lens)).check()


def test_a_graph_replays_the_lengths_of_the_time(target, recorder):
    """Plans between replays overwrite the captured work list in its place."""
    like = dataclasses.replace(PAGED, qo_lens=(), kv_lens=())
    stage = Stage(like, Limits(batch=3, rows=40, pages=90), target)
    lens, graph = torch.zeros(3, dtype=torch.int32, device=target.device), None
    options = {"seq_lens": lens, "lengths_are_upper_bounds": True}
    batches = [((9, 20, 3), (100, 90, 7)), ((3, 0, 9), (40, 0, 64)), ((1, 1, 1), (3, 200, 17))]
    for qo_lens, bounds in (*batches, *batches):
        inputs = stage.make(qo_lens, bounds)
        stage.plan(inputs, **options)
        if graph is None:
            graph = capture(recorder, target.device, stage.run)
        for kv_lens in (bounds, tuple(n // 2 for n in bounds), (0, 0, 0)):
            lens.copy_(lens_of(inputs, kv_lens))
            stage.load(without_keys_after(inputs, kv_lens))
            graph.replay()
            stage.check(inputs, expected=expected_of(inputs, kv_lens))
    for other in ({}, {**options, "seq_lens": lens.clone()}):
        with pytest.raises(ValueError, match=r"a CUDA graph has captured a run.*seq_lens"):
            stage.plan(inputs, **other)


def test_pod(target):
    """The decode side of one prefill, and both sides of batches."""
    device = target.device
    prefill = dataclasses.replace(PAGED, qo_lens=(70, 9), kv_lens=(200, 40), mask=MaskKind.CAUSAL)
    decode = dataclasses.replace(DECODE, num_qo_heads=4)
    both = [build(case, device=device) for case in (prefill, decode)]
    tables = [(x.kv_indptr, x.indices, x.last_page_len) for x in both]
    lens = [lens_of(x, x.case.kv_lens) for x in both]
    one = both[0].request(0)
    q, k, v = one.q, one.k, one.v
    pod = preflash.PODWithPagedKVCacheWrapper(runner.workspace(device), backend=target.backend)
    pod.plan(
        *tables[1], 4, 2, 64, 16, q_data_type=DECODE.dtype, seq_lens=lens[1],
        lengths_are_upper_bounds=True,
    )  # fmt: skip
    batch = preflash.BatchPODWithPagedKVCacheWrapper(
        runner.workspace(device), backend=target.backend
    )
    batch.plan(
        both[0].qo_indptr, *tables[0], both[1].qo_indptr, *tables[1], 4, 2, 64, 16,
        q_data_type=DECODE.dtype, seq_lens_p=lens[0], seq_lens_d=lens[1],
        lengths_are_upper_bounds=True,
    )  # fmt: skip
    now = [(133, 2), RUNS[3]]
    for tensor, kv_lens in zip(lens, now, strict=True):
        tensor.copy_(torch.tensor(kv_lens))
    out_p, (out_d, lse_d) = pod.run(q, k, v, both[1].q, both[1].cache, return_lse_d=True)
    runner.compare(both[1], out_d, lse_d, expected_of(both[1], now[1])).check()
    alone = dataclasses.replace(both[0].pipeline, causal=False)
    runner.compare(both[0], out_p, None, attend(q, k, v, alone)).check()
    results = batch.run(
        both[0].q, both[0].cache, both[1].q, both[1].cache, causal_p=True, return_lse=True
    )
    for x, result, kv_lens in zip(both, results, now, strict=True):
        runner.compare(x, *result, expected_of(x, kv_lens)).check()


def test_outputs_lie_apart_from_the_lengths(target):
    inputs = build(PAGED, device=target.device)
    memory = torch.zeros(inputs.q.shape, dtype=PAGED.dtype, device=target.device)
    lens = memory.view(torch.int32).flatten()[64:69]
    lens.copy_(lens_of(inputs, BOUNDS))
    wrapper = runner.planned(
        inputs, backend=target.backend, seq_lens=lens, lengths_are_upper_bounds=True
    )
    with pytest.raises(ValueError, match="out shares memory with seq_lens"):
        wrapper.run(inputs.q, inputs.cache, out=memory)


LENS = torch.tensor(BOUNDS, dtype=torch.int32)
MASK = torch.ones(30 * 300 + 5 * 90 + 63 + 130, dtype=torch.bool)
# Options of plan(), the error and a piece of its message.
REFUSED = [
    ({"seq_lens": None}, ValueError, "lengths_are_upper_bounds=True and seq_lens=None"),
    ({"seq_lens": LENS[:4]}, ValueError, r"seq_lens has shape \(4,\)"),
    ({"seq_lens": LENS.long()}, TypeError, r"seq_lens is torch.int64.*\.int\(\)"),
    ({"seq_lens": torch.stack([LENS, LENS], 1)[:, 0]}, ValueError, "seq_lens .*contiguous"),
    ({"lengths_are_upper_bounds": "yes"}, TypeError, "lengths_are_upper_bounds"),
    ({"custom_mask": MASK}, NotImplementedError, "with a custom mask"),
    ({"window_left": 9, "fixed_split_size": 64}, ValueError, "keys are not split under a window"),
    # Lengths on the GPU are only read under PREFLASH_DEBUG.
    ({"seq_lens": LENS + 1}, ValueError, r"seq_lens\[0\] = 301: must be in \[0, 300\]"),
    # Without the flag, seq_lens repeats the lengths, here on the host.
    ({"seq_lens": LENS - 1, "lengths_are_upper_bounds": False}, ValueError, r"seq_lens\[0\] = 299"),
]


@pytest.mark.parametrize(("options", "error", "says"), REFUSED)
def test_refusals(target, monkeypatch, options, error, says):
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    given = {"seq_lens": LENS, "lengths_are_upper_bounds": True, **options}
    if given["seq_lens"] is not None and given["lengths_are_upper_bounds"]:
        given["seq_lens"] = target.to(given["seq_lens"])
    inputs = build(PAGED, device=target.device)
    with pytest.raises(error, match=says):
        runner.planned(inputs, backend=target.backend, **given)


def test_one_launch_of_mixed_requests(target):
    """BatchAttention, with a page list and with a block table."""
    inputs = build(PAGED, device=target.device)
    table = torch.full((5, 24), 10**6, dtype=torch.int32)
    for row, pages in zip(table, inputs.page_table, strict=True):
        row[: len(pages)] = torch.tensor(pages)
    table = target.to(table)[:, :20]
    for pages in (inputs.indices, table):
        wrapper = preflash.BatchAttention(device=target.device, backend=target.backend)
        lens = lens_of(inputs, BOUNDS)
        wrapper.plan(
            inputs.qo_indptr, inputs.kv_indptr, pages, lens.clone(), 4, 2, 64, 64, 16, causal=True,
            q_data_type=PAGED.dtype, kv_data_type=PAGED.dtype, seq_lens=lens,
            lengths_are_upper_bounds=True,
        )  # fmt: skip
        for kv_lens in RUNS:
            lens.copy_(lens_of(inputs, kv_lens))
            given = without_keys_after(inputs, kv_lens)
            out, lse = wrapper.run(given.q, given.cache)
            runner.compare(given, out, lse, expected_of(inputs, kv_lens)).check()


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_a_shared_prefix(target, decode):
    case = dataclasses.replace(DECODE if decode else PAGED, num_qo_heads=4, mask=MaskKind.NONE)
    inputs = build(case, device=target.device)
    kind = "Decode" if decode else "Prefill"
    wrapper = getattr(preflash, f"Batch{kind}WithSharedPrefixPagedKVCacheWrapper")(
        runner.workspace(target.device)
    )
    lens = lens_of(inputs, BOUNDS)
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    if decode:
        types = {"data_type": case.dtype}
    else:
        table, types = (inputs.qo_indptr, *table), {"q_data_type": case.dtype}
    wrapper.begin_forward(
        *table, 4, 2, 64, 16, **types, seq_lens=lens, lengths_are_upper_bounds=True
    )
    k, v = (torch.randn(50, 2, 64, device=target.device).to(case.dtype) for _ in range(2))
    kv_lens = RUNS[3]
    lens.copy_(lens_of(inputs, kv_lens))
    given = without_keys_after(inputs, kv_lens)
    out = wrapper.forward(given.q, k, v, given.cache)
    parts = []
    for i, now in enumerate(kv_lens):
        one = inputs.request(i)
        keys, values = torch.cat([k, one.k[:now]]), torch.cat([v, one.v[:now]])
        parts.append(attend(one.q, keys, values, inputs.pipeline))
    expected = concatenate(parts)
    expected.spread = expected.spread + 2 * expected.out.abs()  # roundings of the merge
    runner.compare(given, out, None, expected).check()
