"""pos_encoding_mode="ALIBI": slope(head) * (key - row) on top of each logit, and in the LSE."""

import dataclasses
import itertools
import math

import preflash
import pytest
import torch
from dims_and_singles import DIMS, MASKS, SINGLE, check_single
from preflash.testing import Case, KvForm, Magnitude, MaskKind, Position, build, reference, runner
from preflash.testing.oracle import alibi_slopes

ALIBI = Position.ALIBI
CAUSAL = MaskKind.CAUSAL
HALF, BFLOAT = torch.float16, torch.bfloat16
LOG2_E = math.log2(math.e)


def grid():
    """Dims x masks x soft caps; dtype, storage and layout take turns."""
    turns = itertools.cycle(
        itertools.product((0, 16), (BFLOAT, HALF), ("NHD", "HND"), (KvForm.SEPARATE, KvForm.PADDED))
    )
    for (dim, dim_vo), name, cap in itertools.product(DIMS.items(), MASKS, (None, 15.0)):
        page_size, dtype, layout, form = next(turns)
        mask, window_left = MASKS[name]
        yield Case(
            name,
            (1, 70, 0, 33),
            (40, 131, 9, 33),
            6,
            2,
            dim,
            dim_vo,
            dtype,
            page_size,
            layout,
            form,
            mask,
            window_left,
            cap,
            position=ALIBI,
        )


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_batches(target, case):
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("mask", [MaskKind.NONE, CAUSAL], ids=lambda mask: mask.value)
@pytest.mark.parametrize(
    "heads",
    [(1, 1), (3, 3), (4, 1), (5, 1), (12, 4), (20, 4), (24, 8), (17, 1)],
    ids=lambda heads: f"{heads[0]}over{heads[1]}",
)
def test_head_counts(target, heads, mask, page_size):
    """Counts that are no power of two take half of their slopes from between those of the rest."""
    case = Case("heads", (9, 1), (77, 131), *heads, 64, mask=mask, position=ALIBI)
    case = dataclasses.replace(case, page_size=page_size)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"),
    [((1, 1, 1), (700, 64, 333)), ((3, 0, 70), (512, 9, 250)), ((7, 5), (0, 900))],
    ids=["decode", "append", "no_keys"],
)
@pytest.mark.parametrize(
    ("mask", "split", "dtype"),
    [(MaskKind.NONE, 64, HALF), (CAUSAL, 128, BFLOAT), (CAUSAL, 1, HALF)],
)
def test_split_keys(target, qo_lens, kv_lens, mask, split, dtype):
    """Chunks agree on what their weights are relative to."""
    case = Case("split", qo_lens, kv_lens, 6, 2, 128, dtype=dtype, page_size=16, mask=mask)
    case = dataclasses.replace(case, position=ALIBI, fixed_split_size=split)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize(
    "lengths",
    [((0, 20, 5, 0, 0, 3), (40, 0, 9, 0, 7, 130)), ((0, 0), (0, 0)), ((150, 9), (64, 1))],
    ids=["some_zero", "all_empty", "longer_q"],
)
@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("mask", [MaskKind.NONE, CAUSAL], ids=lambda mask: mask.value)
def test_lengths(target, lengths, page_size, mask):
    case = Case("lengths", *lengths, 4, 2, 64, page_size=page_size, mask=mask, position=ALIBI)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_single(target, case, dtype):
    case = dataclasses.replace(case, dtype=dtype, position=ALIBI)
    check_single(target, case)


@pytest.mark.parametrize("mask", [MaskKind.NONE, CAUSAL], ids=lambda mask: mask.value)
@pytest.mark.parametrize("page_size", [0, 16])
def test_far_positions(target, page_size, mask):
    """Biases of 50000 between a query and its nearest keys, and next to it an ordinary request."""
    case = Case("far", (1, 40), (100_000, 77), 4, 1, 64, page_size=page_size, mask=mask)
    case = dataclasses.replace(case, position=ALIBI)
    runner.check(build(case, device=target.device), backend=target.backend)


def test_far_positions_single(target):
    case = Case("far", (1,), (100_001,), 3, 1, 64, dtype=HALF, position=ALIBI)
    inputs = build(case, device=target.device)
    runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


# ---- what the pipeline's other parts do to it


@pytest.mark.parametrize("sm_scale", [0.4, -0.2, 0.0, 1e-30])
def test_sm_scale_leaves_the_bias(target, sm_scale):
    case = Case("scale", (40, 3), (77, 131), 6, 2, 64, sm_scale=sm_scale, mask=CAUSAL)
    case = dataclasses.replace(case, position=ALIBI)
    runner.check(build(case, device=target.device), backend=target.backend)


def test_the_soft_cap_leaves_the_bias(target):
    """A cap far below the biases of far keys."""
    case = Case("cap", (40, 3), (300, 131), 4, 2, 128, soft_cap=0.5, position=ALIBI)
    runner.check(build(case, device=target.device), backend=target.backend)


def test_very_negative_logits(target):
    case = Case("negative", (20, 70), (77, 300), 4, 2, 64, magnitude=Magnitude.VERY_NEGATIVE)
    case = dataclasses.replace(case, sm_scale=1.0, mask=CAUSAL, position=ALIBI)
    runner.check(build(case, device=target.device), backend=target.backend)


def test_huge_logits(target):
    """Rows of logits of 1e30, which swallow the bias, next to rows whose logits are the bias.

    fa3 makes the former NaN.
    """
    keys, rows, dim = 333, 37, 64
    q = torch.zeros(rows, 4, dim, dtype=BFLOAT)
    q[::3, :, 0] = 256.0
    q[1::3, :, 0] = -256.0
    k = torch.zeros(keys, 2, dim, dtype=BFLOAT)
    k[:, :, 0] = 256.0
    v = torch.randn(keys, 2, dim, generator=torch.Generator().manual_seed(5)).to(BFLOAT)
    sm_scale = 1e30 / 256.0**2
    out, lse = preflash.single_prefill_with_kv_cache(
        *(target.to(x) for x in (q, k, v)),
        sm_scale=sm_scale,
        pos_encoding_mode="ALIBI",
        return_lse=True,
        backend=target.backend,
    )
    # One by one: what the bias is to a logit of 1e30 float64 does not know either.
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * sm_scale
    logits = torch.where(logits == 0, alibi_slopes(4)[:, None, None] * distance, logits)
    expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.double().repeat_interleave(2, 1))
    expected_lse = logits.logsumexp(-1).T * LOG2_E
    if target.backend == "fa3":
        huge = torch.arange(rows) % 3 < 2
        assert bool(out.cpu()[huge].isnan().all())
        assert bool(lse.cpu()[huge].isnan().all())
        out, lse = out.cpu()[~huge], lse.cpu()[~huge]
        expected, expected_lse = expected[~huge], expected_lse[~huge]
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-6, atol=1e-3)


# ---- by hand


@pytest.mark.parametrize(("lse_base", "unit"), [("log2", LOG2_E), ("ln", 1.0)])
def test_lse_counts_from_the_local_row(target, lse_base, unit):
    """With q = 0 the logits are slope * (j - i), i the row within its request."""
    case = Case("zero_q", (5, 3), (40, 7), 6, 2, 64, page_size=16, position=ALIBI)
    inputs = build(case, device=target.device)
    inputs.q.zero_()
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    _, lse = runner.run(wrapper, inputs, lse_base=lse_base)
    for head, slope in enumerate([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]):
        logits = [
            [slope * (key - row) for key in range(kv_len)]
            for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True)
            for row in range(qo_len)
        ]
        wanted = torch.tensor([math.log(sum(map(math.exp, row))) * unit for row in logits])
        torch.testing.assert_close(lse[:, head].cpu(), wanted, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("page_size", [0, 16])
def test_planned_again(target, page_size):
    """Each plan() says which encoding counts; on a GPU the variant tells."""
    case = Case("again", (9, 3), (30, 5), 4, 2, 64, page_size=page_size, position=ALIBI)
    inputs = build(case, device=target.device)
    plain = dataclasses.replace(inputs.pipeline, slopes=None)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for _ in range(2):
        runner.plan(wrapper, inputs)
        assert ("alibi" in wrapper.variant) == (target.backend != "cpu")
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
        runner.plan(wrapper, inputs, pos_encoding_mode="NONE")
        assert "alibi" not in wrapper.variant
        expected = reference(inputs, pipeline=plain)
        runner.compare(inputs, *runner.run(wrapper, inputs), expected).check()
