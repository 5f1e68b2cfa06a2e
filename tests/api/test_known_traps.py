"""Users of attention libraries have met each of these mistakes."""

import math

import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [MaskKind.NONE, MaskKind.CAUSAL])
def test_soft_cap_near_zero_and_far_beyond(target, head_dim, mask):
    """Rows of logits from a thousandth of the cap to a hundred caps, inf and NaN side by side."""
    tokens, keys, cap = 70, 300, 20.0
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(tokens, 4, head_dim, generator=generator)
    k = torch.randn(keys, 2, head_dim, generator=generator).bfloat16()
    v = torch.randn(keys, 2, head_dim, generator=generator).bfloat16()
    factors = torch.tensor([1e-3, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
    q = (q * cap / 4 * factors[torch.arange(tokens) % 7, None, None]).bfloat16()
    k[k == 0] = 1.0  # inf * 0 is NaN
    q[13, :, 3], q[57, 1, 0] = math.inf, math.nan
    case = Case("far", (tokens,), (keys,), 4, 2, head_dim, mask=mask, soft_cap=cap)
    inputs = build(case, device=target.device)
    inputs.q, inputs.k, inputs.v = (t.to(target.device) for t in (q, k, v))
    runner.check(inputs, backend=target.backend)


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("masked", [(3, 4), (), range(20)], ids=["two rows", "no row", "all rows"])
def test_a_masked_row_is_zero_in_a_tile_with_nan(target, masked, split):
    """Masked rows keep nothing; the others keep a key whose value is NaN. 0 * NaN is NaN."""
    case = Case("nan", (20,), (100,), 2, 1, 64, mask=MaskKind.CUSTOM, fixed_split_size=split)
    inputs = build(case, device=target.device)
    mask = inputs.custom_mask.view(20, 100)
    mask[:] = True
    mask[list(masked)] = False
    inputs.v[7] = math.nan
    out, lse = runner.run(runner.planned(inputs, backend=target.backend), inputs)
    keeps = mask[:, 0]
    assert bool((out[~keeps] == 0).all())
    assert bool((lse[~keeps] == -math.inf).all())
    assert bool(out[keeps].isnan().all())
    assert bool(lse[keeps].isfinite().all())


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 56, 72, 80, 88, 96, 104, 120, 136, 160, 192, 248])
def test_the_last_row_ends_the_allocation(target, dim):
    """The oracle table has head dims whose rows end in poisoned columns."""
    inputs = build(Case("dim", (17,), (40,), 2, 1, dim, mask=MaskKind.CAUSAL), device=target.device)
    inputs.k, inputs.v = inputs.k[:40].clone(), inputs.v[:40].clone()
    runner.check(inputs, backend=target.backend)
