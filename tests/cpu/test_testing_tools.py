"""The oracle agrees with SDPA in float64, and the comparison finds known mistakes."""

import dataclasses
import math

import attention_cases
import pytest
import torch
from fuzz.random_cases import random_cases
from preflash.testing import Case, MaskKind, Position, build, compare, oracle, reference, runner
from preflash.testing.comparison import unit_roundoff
from preflash.testing.oracle import Pipeline
from torch.nn.functional import pad, scaled_dot_product_attention


def rotated(x: torch.Tensor, first: int, rope) -> torch.Tensor:
    """Rotates x [n, heads, D] at positions first, first + 1, ... in complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    steps = [rope.theta ** (-2 * d / (2 * half)) / rope.scale for d in range(half)]
    positions = torch.arange(first, first + x.shape[0], dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(steps, dtype=torch.float64)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1)


def kept(case: Case, request) -> torch.Tensor:
    """Returns keep[row, key], by the specification."""
    qo_len, kv_len = request.q.shape[0], request.k.shape[0]
    last, key = torch.arange(kv_len - qo_len, kv_len)[:, None], torch.arange(kv_len)
    keep = (case.window_left < 0) | (key >= last - case.window_left)
    if request.mask is not None:
        return keep & request.mask.bool()
    return keep & (key <= last) if case.mask is MaskKind.CAUSAL else keep


def sdpa(made, request) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the output of a request by torch's attention in float64, and its LSE."""
    case, pipeline = made.case, made.pipeline
    qo_len, kv_len = request.q.shape[0], request.k.shape[0]
    q, k = request.q.double(), request.k.double()
    if pipeline.rope is not None:
        q, k = rotated(q, kv_len - qo_len, pipeline.rope), rotated(k, 0, pipeline.rope)
    k, v = (
        t.repeat_interleave(case.group_size, 1).transpose(0, 1) for t in (k, request.v.double())
    )
    keep = kept(case, request).expand(qo_len, kv_len)
    bias = torch.zeros(case.num_qo_heads, qo_len, kv_len, dtype=torch.float64)
    if case.position is Position.ALIBI:
        distance = torch.arange(kv_len)[None, :] - torch.arange(qo_len)[:, None]
        bias += pipeline.slopes[:, None, None] * distance
    bias.masked_fill_(~keep, -math.inf)
    if made.sinks is not None:  # a key of zeros whose logit is the sink and whose value is 0
        sinks = made.sinks.double()[:, None, None].expand(-1, qo_len, 1)
        bias = torch.cat([bias, sinks], -1)
        k, v = (pad(t, (0, 0, 0, 1)) for t in (k, v))
    q = q.transpose(0, 1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.scale).transpose(0, 1)
    lse = (q @ k.transpose(1, 2) * case.scale + bias).logsumexp(-1).transpose(0, 1)
    return out.masked_fill(~keep.any(1)[:, None, None], 0.0), lse * oracle.LOG2_E


SMALL = [
    dataclasses.replace(
        case,
        qo_lens=tuple(min(n, 40) for n in case.qo_lens),
        kv_lens=tuple(min(n, 70) for n in case.kv_lens),
        soft_cap=None,
    )
    for case in [*attention_cases.core(), *random_cases(30, seed=11)]
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_oracle_is_sdpa_in_float64(case):
    made = build(case)
    expected = reference(made)
    assert bool(expected.out.isfinite().all())
    wanted = zip(*(sdpa(made, made.request(i)) for i in range(case.batch_size)), strict=True)
    for got, parts in zip((expected.out, expected.lse), wanted, strict=True):
        torch.testing.assert_close(got, torch.cat(parts), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=("f16", "bf16"))
def test_rotated_operands_may_be_rounded_once(dtype):
    """Kernels multiply 16 bits after the rotation, and the bounds know it; nothing else passes."""
    case = Case("rounded", (70,), (131,), 4, 2, 128, dtype=dtype, mask=MaskKind.CAUSAL)
    made = build(dataclasses.replace(case, position=Position.ROPE))
    request, expected = made.request(0), reference(made)

    def attend(first_key: int, rounded: torch.dtype):
        q, k = (
            rotated(x.double(), first, made.pipeline.rope).to(rounded)
            for x, first in ((request.q, 61), (request.k, first_key))
        )
        got = oracle.attend(q, k, request.v, dataclasses.replace(made.pipeline, rope=None))
        return got.out.to(dtype), got.lse.float()

    compare(*attend(0, dtype), expected, rotated_dtype=dtype).check()
    assert not compare(*attend(0, dtype), expected).ok
    assert not compare(*attend(1, dtype), expected, rotated_dtype=dtype).ok
    assert not compare(*attend(0, torch.float8_e4m3fn), expected, rotated_dtype=dtype).ok


def test_oracle_lse_and_soft_cap_by_hand():
    q, k = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 1.0]], [[-1.0, 0.5]]])
    v = torch.tensor([[[10.0]], [[20.0]]])
    x = [2.0 * math.tanh(0.5 * dot / 2.0) for dot in (5.0, 0.0)]
    total = math.exp(x[0]) + math.exp(x[1])
    got = oracle.attend(q, k, v, Pipeline(0.5, soft_cap=2.0, out_scale=3.0))
    assert got.lse.item() == pytest.approx(math.log2(total), abs=1e-12)
    weights = [math.exp(value) / total for value in x]
    assert got.out.item() == pytest.approx(3.0 * (10 * weights[0] + 20 * weights[1]), abs=1e-12)


def test_oracle_merge_is_attention_over_the_union():
    made = build(Case("union", (7,), (50,), 2, 1, 64, dtype=torch.float32))
    request, pipeline = made.request(0), made.pipeline
    parts = [
        oracle.attend(request.q, request.k[a:b], request.v[a:b], pipeline)
        for a, b in ((0, 9), (9, 10), (10, 50))
    ]
    out, lse = oracle.merge(
        torch.stack([p.out for p in parts], 1), torch.stack([p.lse for p in parts], 1)
    )
    expected = reference(made)
    torch.testing.assert_close(out, expected.out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-10, atol=1e-10)


def test_everything_unowned_is_poisoned():
    case = Case("poison", (3, 9), (5, 20), 2, 1, 16, page_size=4)
    made = build(case)
    for pool in (made.k, made.v):
        owned = 25 * 16
        assert int(pool.isfinite().sum()) == owned
        assert bool(pool.isnan().any())
        assert bool(pool.isinf().any())
    assert made.kv_indptr.tolist() == [0, 2, 7]
    assert made.last_page_len.tolist() == [1, 4]


# The cpu backend passes, mistakes do not.

BASE = Case("comparison", (40, 3), (130, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def computed(made, **options):
    """Returns output and LSE of the cpu backend; options: of plan()."""
    return runner.run(runner.planned(made, backend="cpu", **options), made)


def without_a_key(made) -> torch.Tensor:
    """Returns the causal mask without one key of row 17."""
    pipeline, requests = made.pipeline, map(made.request, range(2))
    masks = [oracle.kept(pipeline, len(one.q), len(one.k), None) for one in requests]
    masks[0][17, 100] = False
    return torch.cat([mask.flatten() for mask in masks])


WRONG_OPTIONS = {
    "window": {"window_left": 100},
    "not_causal": {"causal": False},
    "scale": {"sm_scale": BASE.scale * 1.002},
    "one_key": {"custom_mask": without_a_key(build(BASE))},
}
SPOILED = {
    "natural_log": lambda out, lse: lse.mul_(math.log(2.0)),
    "row_swap": lambda out, lse: out[3:5].copy_(out[3:5].flip(0)),
    "stale_row": lambda out, lse: out[11, 2].fill_(math.nan),
    "one_element": lambda out, lse: out[5, 1, 7].add_(0.05),
    "two_units": lambda out, lse: out.mul_(1 + 2 * max(unit_roundoff(out.dtype), 1e-4)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", [*WRONG_OPTIONS, *SPOILED])
def test_mistakes_fail(dtype, mistake):
    made = build(BASE.with_dtype(dtype))
    report = compare(*computed(made), reference(made))
    assert report.ok, report
    assert report.worst_ratio > 0.001
    out, lse = computed(made, **WRONG_OPTIONS.get(mistake, {}))
    if mistake in SPOILED:
        SPOILED[mistake](out, lse)
    assert not compare(out, lse, reference(made)).ok


def test_a_masked_row_must_be_exactly_zero_with_an_infinite_lse():
    case = Case("masked", (9,), (4,), 2, 1, 64, mask=MaskKind.CAUSAL, dtype=torch.float32)
    expected = reference(build(case))
    out, lse = expected.out.float(), expected.lse.float()
    assert compare(out, lse, expected).ok
    assert not compare(out, lse.nan_to_num(neginf=-5e4), expected).ok
    for value in (math.nan, math.inf, 1e-30):
        out[2, 1, 3] = value
        assert not compare(out, lse, expected).ok


def test_a_report_says_where():
    made = build(BASE)
    out, lse = computed(made)
    out[5, 1, 7] += 3
    report = compare(out, lse, reference(made))
    assert "(5, 1, 7)" in str(report)
    with pytest.raises(AssertionError, match="outside their bound"):
        report.check()
    with pytest.raises(ValueError, match="single"):
        runner.single(made, backend="cpu")


def test_quantized_rows():
    """The oracle's rounding of queries to e4m3 times a power of two of each row."""
    rows = torch.tensor(
        [[448.0, -17.5], [449.0, 1.0], [3.0, 2.0**-20], [0.0, -0.0], [1.0, math.inf]]
    )
    wanted = torch.tensor([[448.0, -18.0], [448.0, 1.0], [3.0, 0.0], [0.0, 0.0]]).double()
    got = oracle.quantized_rows(rows)
    assert torch.equal(got[:4], wanted)
    assert got[4].isnan().all()
    q = torch.randn(50, 64).bfloat16()
    for power in (-100, 0, 60):
        assert torch.equal(
            oracle.quantized_rows(q * 2.0**power), oracle.quantized_rows(q) * 2.0**power
        )
