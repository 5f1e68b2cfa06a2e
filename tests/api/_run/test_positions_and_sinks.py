"""Positions and sinks change from plan to plan and call to call; test_cases.py has their cases."""

import dataclasses

import pytest
import torch
from planned_cases import check_run, planned
from preflash.testing import Case, Magnitude, MaskKind, Position, reference, runner
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


def values(device) -> torch.Tensor:
    return torch.tensor([0.5, -1.0, -float("inf"), 30.0], device=device)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": MaskKind.CAUSAL},
        {"mask": MaskKind.CUSTOM, "page_size": 16},
        {"mask": MaskKind.CAUSAL, "fixed_split_size": 64},
    ],
    ids=["ragged", "paged", "split"],
)
def test_each_run_has_its_own(target, changes):
    """Other memory, other values in the same memory, and none; scales do not apply to sinks."""
    inputs, wrapper = planned(dataclasses.replace(RAGGED, **changes), target)
    sinks, scales = values(target.device), {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.25}
    for change in (torch.Tensor.clone, lambda t: t.flip(0) * 3, lambda t: t.mul_(0.5)):
        sinks = change(sinks)
        given = dataclasses.replace(inputs, sinks=sinks)
        pipeline = given.pipeline
        windowed = dataclasses.replace(pipeline, window_left=3)
        scaled = dataclasses.replace(pipeline, sm_scale=pipeline.sm_scale * 1.5, out_scale=0.25)
        for base, of_run, options in (
            ("log2", pipeline, {}),
            ("log2", windowed, {"window_left": 3}),
            ("ln", scaled, scales),
            ("log2", pipeline, {}),
        ):
            expected = reference(given, pipeline=of_run)
            result = runner.run(wrapper, inputs, sinks=sinks, lse_base=base, **options)
            runner.compare(given, *result, expected, lse_base=base).check()
        check_run(inputs, wrapper)
