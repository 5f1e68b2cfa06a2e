"""Positions and sinks at the limits; random problems have them with everything else."""

import dataclasses

import pytest
import torch
from planned_cases import planned
from preflash.testing import Case, Magnitude, MaskKind, Position, build, runner
from preflash.testing.oracle import alibi_slopes

ALIBI, ROPE = Position.ALIBI, Position.ROPE
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64)
BASES = {"log2": 1.4426950408889634, "ln": 1.0}


def test_slopes_of_heads_that_are_no_power_of_two():
    """Kernels are compared with these by every case of ALiBi."""
    assert alibi_slopes(6).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_very_negative_logits_of_rope(target):
    case = Case("negative", (20, 70), (77, 300), 4, 2, 64, magnitude=Magnitude.VERY_NEGATIVE,
                sm_scale=1e-3, mask=MaskKind.CAUSAL, position=ROPE)  # fmt: skip
    inputs, wrapper = planned(case, target)
    # Rotated products are not exact: they are rounded as ordinary numbers are.
    runner.compare(inputs, *runner.run(wrapper, inputs), logit_rounding=32.0).check()


def far_positions():
    """Yields ALiBi's biases of 50000 between a query and its nearest keys, and RoPE's angles of
    2^17 radians, of which float32 would know two digits after the point; a scale of 1/3 has a
    float32 neighbour that is off by as much there."""
    for page_size, mask, scale in ((0, MaskKind.NONE, 1 / 3), (16, MaskKind.CAUSAL, 1.0)):
        case = Case("far", (1, 40), (100_000, 77), 4, 1, 64, page_size=page_size)
        yield dataclasses.replace(case, mask=mask, position=ALIBI)
        # Few keys have weights, and large ones, so that errors of their logits stay visible.
        case = dataclasses.replace(case, kv_lens=(140_000, 77), window_left=40, sm_scale=0.5)
        yield dataclasses.replace(case, mask=MaskKind.CAUSAL, position=ROPE, rope_scale=scale)


@pytest.mark.parametrize("case", list(far_positions()), ids=lambda case: case.id)
def test_far_positions(target, case):
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("split", [None, 64])
def test_sinks_beyond_float32_in_base_2(target, split):
    """A sink as large as float32 permits is the largest number of its sign in base 2, too; an
    infinity would make NaN of rows whose keys are split. Rows without keys keep the sink alone."""
    largest = torch.finfo(torch.float32).max
    sinks = torch.tensor([largest, 2.5e38, -largest, -2.5e38])
    case = Case("largest", (1, 40, 9), (700, 333, 0), 4, 2, 64, page_size=16)
    inputs, wrapper = planned(dataclasses.replace(case, fixed_split_size=split), target)
    for base, unit in BASES.items():
        without, lse_without = runner.run(wrapper, inputs, lse_base=base)
        out, lse = runner.run(wrapper, inputs, lse_base=base, sinks=target.to(sinks))
        alone = torch.sign(sinks) * largest * (unit / BASES["log2"])
        alone = target.to(alone).expand(lse.shape)
        assert bool((out[:, :2] == 0).all())
        torch.testing.assert_close(lse[:, :2], alone[:, :2], rtol=1e-6, atol=0.0)
        assert torch.equal(out[:, 2:], without[:, 2:])
        torch.testing.assert_close(lse[:41, 2:], lse_without[:41, 2:], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse[41:, 2:], alone[41:, 2:], rtol=1e-6, atol=0.0)
