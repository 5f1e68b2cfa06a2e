"""With lengths_are_upper_bounds=True plan() reads upper bounds of the keys, run() their lengths."""

import dataclasses

import preflash
import pytest
import torch
from fuzz.altered_inputs import with_bounds
from fuzz.pod_trial import plan_decode
from graph_stage import Limits, Stage, capture
from planned_cases import bounds_of, check_run, shared_prefix, table
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.inputs import as_nhd, pages_of
from preflash.testing.oracle import attend, concatenate
from refusals import refused
from wrapper_options import block_table

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
    "many keys": dataclasses.replace(FEW, kv_lens=(2500, 1100)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# Keys under a window are split from its beginning on. The fuzzer has bounds under every option.
WINDOWS = [
    dataclasses.replace(case, window_left=window)
    for case in (PAGED, CASES["many keys"])
    for window in (20, 900)
]


def runs_of(case: Case) -> tuple[tuple[int, ...], ...]:
    if case.kv_lens == BOUNDS:
        return RUNS
    return case.kv_lens, (0, 517), (299, 2), tuple(map(min, case.kv_lens, (1700, 901)))


def bounded(inputs, target, **options):
    bounds = bounds_of(inputs)
    wrapper = runner.planned(inputs, backend=target.backend, **bounds, **options)
    return wrapper, bounds["seq_lens"]


def now(inputs, lens, kv_lens):
    """Sets the lengths. Returns the inputs with NaN in all keys after them, and the results."""
    lens.copy_(torch.tensor(kv_lens))
    case, parts = inputs.case, []
    inputs = dataclasses.replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
    for i, (length, bound) in enumerate(zip(kv_lens, case.kv_lens, strict=True)):
        one = inputs.request(i)
        parts.append(attend(one.q, one.k[:length], one.v[:length], inputs.pipeline))
        after = torch.arange(length, bound, device=lens.device)
        for t in (inputs.k, inputs.v):
            if case.paged:
                pages = torch.tensor(inputs.page_table[i], device=lens.device).long()
                place = (pages[after // case.page_size], after % case.page_size)
                pages_of(t, case)[place] = float("nan")
            else:
                as_nhd(t, case.layout)[after + sum(case.kv_lens[:i])] = float("nan")
    if case.paged:
        inputs.cache = (inputs.k, inputs.v)
    return inputs, concatenate(parts)


@pytest.mark.parametrize("case", [*CASES.values(), *WINDOWS], ids=lambda case: case.id)
def test_numbers_of_keys_at_the_time_of_a_run(target, case):
    inputs = build(case, device=target.device)
    wrapper, lens = bounded(inputs, target)
    for kv_lens in runs_of(case):
        given, expected = now(inputs, lens, kv_lens)
        check_run(given, wrapper, expected)


@every_case
def test_the_bounds_as_lengths_are_an_ordinary_plan(target, case):
    """The same bits; numbers outside of [0, bound] are clamped."""
    inputs = build(case, device=target.device)
    wrapper, lens = bounded(inputs, target, disable_split_kv=True)
    exact = runner.planned(inputs, backend=target.backend, disable_split_kv=True)
    wanted = runner.run(exact, inputs)
    for more in (0, 5, 10**9):
        lens.copy_(torch.tensor(case.kv_lens) + more)
        assert all(map(torch.equal, runner.run(wrapper, inputs), wanted))
    given, expected = now(inputs, lens, [0] * case.batch_size)
    lens.fill_(-3)
    check_run(given, wrapper, expected)


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
            given, expected = now(inputs, lens, kv_lens)
            stage.load(given)
            graph.replay()
            stage.check(inputs, expected=expected)
    for other in ({}, {**options, "seq_lens": lens.clone()}):
        refused(r"a CUDA graph has captured a run.*seq_lens", stage.plan, inputs, **other)


def test_outputs_lie_apart_from_the_lengths(target):
    inputs = build(PAGED, device=target.device)
    bounds = bounds_of(inputs)
    memory = torch.zeros(inputs.q.shape, dtype=PAGED.dtype, device=target.device)
    inside = memory.view(torch.int32).flatten()[64:69].copy_(bounds["seq_lens"])
    wrapper = runner.planned(inputs, backend=target.backend, **{**bounds, "seq_lens": inside})
    refused("out shares memory with seq_lens", wrapper.run, inputs.q, inputs.cache, out=memory)


SIZES = (4, 2, 64, 16)


@pytest.mark.parametrize("kind", ["POD", "BatchPOD"])
def test_prefill_beside_decode(target, kind):
    """The decode side of one prefill, and both sides of batches."""
    prefill = dataclasses.replace(PAGED, qo_lens=(70, 9), kv_lens=(200, 40))
    if kind == "POD":
        prefill = dataclasses.replace(RAGGED, qo_lens=(70,), kv_lens=(200,))
    decode = dataclasses.replace(DECODE, num_qo_heads=4, mask=MaskKind.NONE)
    p, d = (build(case, device=target.device) for case in (prefill, decode))
    make = getattr(preflash, f"{kind}WithPagedKVCacheWrapper")
    pod = make(runner.workspace(target.device), backend=target.backend)
    lens_p, lens_d = (bounds_of(x)["seq_lens"] for x in (p, d))
    options = {"q_data_type": DECODE.dtype, "lengths_are_upper_bounds": True}
    if kind == "POD":
        plan_decode(pod, with_bounds(d), **options, seq_lens=lens_d)
        got = pod.run_return_lse(p.q, p.k[:200], p.v[:200], d.q, d.cache, causal_p=True)
    else:
        arrays = [x for y in map(with_bounds, (p, d)) for x in (y.qo_indptr, *table(y))]
        pod.plan(*arrays, *SIZES, **options, seq_lens_p=lens_p, seq_lens_d=lens_d)
        got = pod.run(p.q, p.cache, d.q, d.cache, causal_p=True, return_lse=True)
    for inputs, result in zip((p, d), got, strict=True):
        runner.compare(inputs, *result).check()


@pytest.mark.parametrize("as_table", [False, True])
def test_one_launch_of_mixed_requests(target, as_table):
    inputs = build(PAGED, device=target.device)
    bounds = bounds_of(inputs)
    pages = block_table(inputs).to(target.device) if as_table else inputs.indices
    wrapper = preflash.BatchAttention(device=target.device, backend=target.backend)
    wrapper.plan(
        inputs.qo_indptr, inputs.kv_indptr, pages, bounds["seq_lens"].clone(), 4, 2, 64, 64, 16,
        causal=True, q_data_type=PAGED.dtype, kv_data_type=PAGED.dtype, **bounds,
    )  # fmt: skip
    for kv_lens in RUNS:
        given, expected = now(inputs, bounds["seq_lens"], kv_lens)
        runner.compare(given, *wrapper.run(given.q, given.cache), expected).check()


@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
def test_a_shared_prefix(target, kind):
    case = dataclasses.replace(DECODE if kind == "Decode" else PAGED, mask=MaskKind.NONE)
    inputs, (k, v), expected = shared_prefix(case, target.device, 50)
    make = getattr(preflash, f"Batch{kind}WithSharedPrefixPagedKVCacheWrapper")
    wrapper, given = make(runner.workspace(target.device)), with_bounds(inputs)
    arrays, dtype = table(given), {"data_type": case.dtype}
    if kind == "Prefill":
        arrays, dtype = (given.qo_indptr, *arrays), {"q_data_type": case.dtype}
    wrapper.begin_forward(*arrays, case.num_qo_heads, *SIZES[1:], **dtype, **bounds_of(inputs))
    runner.compare(inputs, wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
