"""merge_state, merge_state_in_place and merge_states compute what the float64 oracle does."""

import math

import preflash
import pytest
import torch
from preflash.testing import oracle
from preflash.testing.comparison import unit_roundoff

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def states(target, tokens, count, heads, dim, dtype):
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(tokens, count, heads, dim, generator=generator).to(dtype)
    s = torch.randn(tokens, count, heads, generator=generator) * 6
    s[torch.rand(s.shape, generator=generator) < 0.2] = -math.inf
    v[s == -math.inf] = 0
    return target.to(v), target.to(s)


def halves(v, s):
    return [x[:, i].contiguous() for i in range(2) for x in (v, s)]


def check(got, expected, dtype):
    """Permits one rounding of the output, and float32 inside."""
    (v, s), (expected_v, expected_s) = got, expected
    assert (v.dtype, s.dtype, v.shape) == (dtype, torch.float32, expected_v.shape)
    if v.numel() == 0:
        return
    size = expected_v.abs()
    bound = unit_roundoff(v.dtype) * size + 2.0**-20 * (1 + size.max().item())
    assert bool(((v.double() - expected_v).abs() <= bound).all())
    torch.testing.assert_close(s, expected_s, rtol=2e-6, atol=2e-6, check_dtype=False)
    assert bool((v[expected_s == -math.inf] == 0).all())


@dtypes
@pytest.mark.parametrize(
    "shape", [(5, 3, 64), (1, 1, 8), (33, 8, 128), (7, 2, 256), (4, 3, 96), (0, 4, 64)], ids=str
)
def test_two_states(target, shape, dtype):
    """In place, a mask names the tokens that change."""
    v, s = states(target, shape[0], 2, *shape[1:], dtype)
    expected = oracle.merge(v, s)
    given = halves(v, s)
    check(preflash.merge_state(*given), expected, dtype)
    assert all(map(torch.equal, given, halves(v, s)))
    every_third = target.to(torch.arange(shape[0]) % 3 == 0)
    for mask in (None, ~every_third):
        changed = torch.ones_like(every_third) if mask is None else mask
        merged = [x.clone() for x in given[:2]]
        assert preflash.merge_state_in_place(*merged, *given[2:], mask=mask) is None
        check([x[changed] for x in merged], [x[changed] for x in expected], dtype)
        for new, old in zip(merged, given[:2], strict=True):
            assert torch.equal(new[~changed], old[~changed])


@dtypes
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 40])
def test_any_number_of_states(target, count, dtype):
    v, s = states(target, 11, count, 3, 64, dtype)
    none = torch.zeros(11, 3, 64), torch.full((11, 3), -math.inf)
    expected = oracle.merge(v, s) if count else tuple(map(target.to, none))
    for merge in (preflash.merge_states, torch.ops.preflash.merge_states):
        check(merge(v, s), expected, dtype)


def test_minus_infinity_returns_the_other_side(target):
    v, s = target.to(torch.randn(4, 2, 64).half()), target.to(torch.randn(4, 2))
    none = torch.full_like(s, -math.inf)
    # Values in a state of weight zero have no influence, not even NaN.
    rubbish = torch.full_like(v, math.nan)
    for out, lse in (
        preflash.merge_state(v, s, rubbish, none),
        preflash.merge_state(rubbish, none, v, s),
        preflash.merge_states(torch.stack([rubbish, v], 1), torch.stack([none, s], 1)),
    ):
        assert torch.equal(out, v)
        torch.testing.assert_close(lse, s, rtol=1e-6, atol=1e-6)
    out, lse = preflash.merge_state(rubbish, none, rubbish, none)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_large_statistics(target):
    """2^s overflows float32; only differences count."""
    v = target.to(torch.randn(3, 2, 2, 64))
    s = target.to(torch.tensor([[[3.6e5], [3.6e5 - 1]], [[-3.6e5], [-3.6e5 - 2]], [[1e4], [-1e4]]]))
    s = s.expand(3, 2, 2).contiguous()
    check(preflash.merge_states(v, s), oracle.merge(v, s), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_log_sums_of_other_float_types(target, dtype):
    """They are converted; the merged one is float32 as ever."""
    v, s = states(target, 7, 2, 3, 64, torch.float16)
    s = s.to(dtype)
    expected, parts = oracle.merge(v, s.float()), halves(v, s)
    merged = parts[0].clone(), parts[1].float()
    preflash.merge_state_in_place(*merged, *parts[2:])
    for got in (preflash.merge_state(*parts), preflash.merge_states(v, s), merged):
        check(got, expected, torch.float16)


TWO, NONE, SHORT_MASK = torch.ones(2, 2, 64), torch.ones(3, 2, 0), torch.ones(2).bool()
REFUSED = [
    ("merge_state", {"v_b": TWO}, ValueError, "v_b|v_a"),
    ("merge_state", {"s_a": TWO[..., 0]}, ValueError, "s_a"),
    ("merge_state", {"s_a": torch.ones(3, 2).int()}, TypeError, "s_a"),
    ("merge_state", {"v_b": torch.ones(3, 2, 64).half()}, TypeError, "v_b|v_a"),
    ("merge_state", {"v_a": TWO[0]}, ValueError, "v_a"),
    ("merge_state", {"v_a": NONE, "v_b": NONE}, ValueError, "v_a .*head_dim of 1"),
    ("merge_state_in_place", {"s": torch.ones(3, 2).half()}, TypeError, r"\bs\b"),
    ("merge_state_in_place", {"v_other": TWO}, ValueError, "v_other|v"),
    ("merge_state_in_place", {"mask": SHORT_MASK}, ValueError, "mask"),
    ("merge_states", {"v": torch.ones(3, 2, 64)}, ValueError, r"\bv\b"),
    ("merge_states", {"s": torch.ones(3, 2)}, ValueError, r"\bs\b"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "says"), REFUSED)
def test_refusals(name, wrong, error, says):
    v, s = torch.randn(3, 2, 64), torch.randn(3, 2)
    right = {
        "merge_state": {"v_a": v, "s_a": s, "v_b": v, "s_b": s},
        "merge_state_in_place": {"v": v, "s": s, "v_other": v.clone(), "s_other": s.clone()},
        "merge_states": {"v": v[:, None], "s": s[:, None]},
    }
    with pytest.raises(error, match=says):
        getattr(preflash, name)(**{**right[name], **wrong})
