"""Sinks: one more logit of each row of a head, in the denominator and the LSE, counted once."""

import dataclasses
import itertools
import math

import planned_cases
import preflash
import pytest
import torch
from dims_and_singles import SINGLE, check_single
from preflash.testing import Case, KvForm, MaskKind, Position, Sinks, build, runner
from preflash.testing.comparison import compare
from preflash.testing.oracle import reference

CAUSAL = MaskKind.CAUSAL
HALF, BFLOAT = torch.float16, torch.bfloat16
LOG2_E = math.log2(math.e)
BASES = {"log2": LOG2_E, "ln": 1.0}

# mask, window_left, soft_cap
MASKS = {
    "full": (MaskKind.NONE, -1, None),
    "causal": (CAUSAL, -1, None),
    "window": (CAUSAL, 37, 15.0),
    "custom": (MaskKind.CUSTOM, -1, None),
}
DIMS = {64: None, 96: None, 128: None, 192: 128, 256: None, 320: None, 512: None}


def grid():
    turns = itertools.cycle(
        itertools.product((0, 16, 5), (BFLOAT, HALF), ("NHD", "HND"), (None, 64))
    )
    for (dim, dim_vo), name, sinks in itertools.product(
        DIMS.items(), MASKS, (Sinks.ORDINARY, Sinks.MIXED)
    ):
        page_size, dtype, layout, split = next(turns)
        mask, window_left, cap = MASKS[name]
        yield Case(
            name,
            (1, 70, 0, 33, 20),
            (140, 131, 9, 33, 7),
            8,
            2,
            dim,
            dim_vo,
            dtype,
            page_size,
            layout,
            KvForm.SEPARATE,
            mask,
            window_left,
            cap,
            fixed_split_size=split,
            sinks=sinks,
        )


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_batches(target, case):
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("sinks", list(Sinks), ids=lambda sinks: sinks.value)
@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 64}], ids=str)
@pytest.mark.parametrize("position", list(Position), ids=lambda position: position.value)
@pytest.mark.parametrize("page_size", [0, 16])
def test_counted_once(target, sinks, split, position, page_size):
    """Eleven chunks or one; with a bias of each head that the sink does not get."""
    case = Case("once", (1, 9), (700, 300), 6, 3, 64, page_size=page_size, sinks=sinks)
    case = dataclasses.replace(case, position=position, **split)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (12, 4), (17, 1)], ids=str)
def test_head_counts(target, heads):
    case = Case("heads", (9, 1), (77, 131), *heads, 64, mask=CAUSAL, sinks=Sinks.ORDINARY)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_single(target, case, dtype):
    case = dataclasses.replace(case, dtype=dtype, sinks=Sinks.ORDINARY)
    check_single(target, case)


# ---- rows that keep no key

EMPTY = {
    "no_keys": Case("no_keys", (5, 70), (0, 0), 4, 2, 64),
    "before_the_first_key": Case("longer_q", (90,), (33,), 4, 2, 128, mask=CAUSAL),
    "masked": Case("masked", (40,), (300,), 4, 2, 128, mask=MaskKind.CUSTOM),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", EMPTY)
def test_rows_without_keys(target, name, page_size, split, base):
    """Output exactly 0, and the sink alone in the LSE; -inf where it is -inf."""
    case = dataclasses.replace(EMPTY[name], page_size=page_size, fixed_split_size=split)
    inputs = build(dataclasses.replace(case, sinks=Sinks.MIXED), device=target.device)
    inputs.sinks[0] = 0.75
    if case.mask is MaskKind.CUSTOM:
        inputs.custom_mask.view(*case.qo_lens, *case.kv_lens)[7:] = False
        inputs.masks[0][7:] = False
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs, lse_base=base)
    expected = reference(inputs)
    assert bool(expected.empty.any())
    assert bool((out[expected.empty] == 0).all())
    alone = (inputs.sinks * BASES[base]).expand(lse.shape)
    torch.testing.assert_close(lse[expected.empty], alone[expected.empty], rtol=3e-7, atol=1e-6)
    compare(out, lse, expected, lse_base=base).check()


# ---- what else a run brings


def planned(target, **changes):
    case = Case("run", (9, 40), (30, 333), 4, 2, 128, page_size=16, sinks=Sinks.ORDINARY)
    return planned_cases.planned(dataclasses.replace(case, **changes), target)


@pytest.mark.parametrize("split", [None, 64])
def test_scales_are_not_the_sinks(target, split):
    inputs, wrapper = planned(target, fixed_split_size=split)
    result = runner.run(wrapper, inputs, q_scale=0.5, k_scale=3.0, v_scale=0.25)
    scale = inputs.case.scale * 1.5
    pipeline = dataclasses.replace(inputs.pipeline, sm_scale=scale, out_scale=0.25)
    compare(*result, reference(inputs, pipeline=pipeline)).check()


@pytest.mark.parametrize("split", [None, 64])
def test_each_run_has_its_own(target, split):
    """Other values in the same memory, none, and others again: a plan knows nothing of sinks."""
    inputs, wrapper = planned(target, fixed_split_size=split)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    inputs.sinks.neg_()
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    inputs.sinks = None
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    inputs.sinks = torch.tensor([5.0, -5.0, 0.0, 1.0], device=target.device)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("page_size", [0, 16])
def test_lse_bases(target, base, page_size):
    inputs, wrapper = planned(target, page_size=page_size)
    out, lse = runner.run(wrapper, inputs, lse_base=base)
    compare(out, lse, reference(inputs), lse_base=base).check()


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("magnitude", [1e8, 1e30])
def test_huge_logits(target, magnitude, split):
    """Whichever of the two is larger takes everything; fa3 makes such rows NaN."""
    keys, rows, dim = 333, 37, 64
    q = torch.zeros(rows, 4, dim, dtype=BFLOAT)
    q[::2, :, 0], q[1::2, :, 0] = 256.0, -256.0
    k = torch.zeros(keys, 2, dim, dtype=BFLOAT)
    k[:, :, 0] = 256.0
    v = torch.randn(keys, 2, dim, generator=torch.Generator().manual_seed(5)).to(BFLOAT)
    sinks = torch.tensor([0.0, 2 * magnitude, -2 * magnitude, -math.inf])
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    wrapper.plan(
        *(torch.tensor([0, n], dtype=torch.int32) for n in (rows, keys)),
        4,
        2,
        dim,
        sm_scale=magnitude / 256.0**2,
        q_data_type=BFLOAT,
        fixed_split_size=split,
    )
    out, lse = wrapper.run(
        *(target.to(x) for x in (q, k, v)), sinks=target.to(sinks), return_lse=True
    )
    if target.backend == "fa3":
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())
        return
    logits = torch.where(torch.arange(rows) % 2 == 0, magnitude, -magnitude).double()
    logits = logits[:, None].expand(rows, 4)
    mean = v.double().mean(0).repeat_interleave(2, 0).expand(rows, 4, dim)
    wins = (logits > sinks)[..., None]
    torch.testing.assert_close(out.cpu().double(), mean * wins, rtol=1e-2, atol=8e-3)
    expected = torch.maximum(logits + math.log(keys) * (magnitude < 1e10), sinks.double())
    torch.testing.assert_close(lse.cpu().double(), expected * LOG2_E, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("split", [None, 64])
def test_sinks_beyond_float32_in_base_2(target, base, split):
    """Sinks as large as a float32 gets are the largest number of their sign in base 2, too; an
    infinity there would make NaN of the rows whose keys are split. Rows of the request without keys
    keep the sink alone."""
    largest = torch.finfo(torch.float32).max
    sinks = torch.tensor([largest, 2.5e38, -largest, -2.5e38])
    case = Case("largest", (1, 40, 9), (700, 333, 0), 4, 2, 64, page_size=16)
    inputs = build(dataclasses.replace(case, fixed_split_size=split), device=target.device)
    wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    without, lse_without = runner.run(wrapper, inputs, lse_base=base)
    inputs.sinks = target.to(sinks)
    out, lse = runner.run(wrapper, inputs, lse_base=base)
    alone = target.to(torch.sign(sinks) * largest * (BASES[base] / LOG2_E)).expand(lse.shape)
    assert bool((out[:, :2] == 0).all())
    torch.testing.assert_close(lse[:, :2], alone[:, :2], rtol=1e-6, atol=0.0)
    assert torch.equal(out[:, 2:], without[:, 2:])
    torch.testing.assert_close(lse[:41, 2:], lse_without[:41, 2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse[41:, 2:], alone[41:, 2:], rtol=1e-6, atol=0.0)
