"""ALiBi, RoPE and sinks over head dims and masks, and fp8 too of single requests."""

import dataclasses

import pytest
import torch
from dims_and_singles import SINGLE, check_single, grid
from preflash.testing import Case, MaskKind, Position, Sinks, build, runner

ALIBI, ROPE = Position.ALIBI, Position.ROPE
CAUSAL, NONE = MaskKind.CAUSAL, MaskKind.NONE
# Changes of a case, by option.
POSITIONS = {
    "alibi": {"position": ALIBI},
    "rope": {"position": ROPE, "rope_scale": 8.0, "rope_theta": 5e5},
    "rope_with_sinks": {"position": ROPE, "sinks": Sinks.MIXED},
}
OTHERS = ({"position": ROPE, "rope_scale": 0.25}, {"sinks": Sinks.ORDINARY})
OPTIONS = POSITIONS | {
    "f16_e5m2": {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2, "head_scales": True},
    "e4m3": {"dtype": torch.float8_e4m3fn, "head_scales": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def far_positions():
    """ALiBi's biases of 50000 between a query and its nearest keys. RoPE's angles of 2^17 radians,
    of which float32 would know two digits after the point; a scale of 1/3 has a float32 neighbour
    that is off by as much there."""
    for page_size, mask, scale in ((0, NONE, 1 / 3), (16, CAUSAL, 1.0)):
        case = Case("far", (1, 40), (100_000, 77), 4, 1, 64, page_size=page_size)
        yield dataclasses.replace(case, mask=mask, position=ALIBI)
        # Few keys have weights, and large ones, so that errors of their logits stay visible.
        case = dataclasses.replace(case, kv_lens=(140_000, 77), window_left=40, sm_scale=0.5)
        yield dataclasses.replace(case, mask=CAUSAL, position=ROPE, rope_scale=scale)


# Five options take turns: with twelve masks and caps, each meets most of them at some head dim.
CASES = (*grid(*POSITIONS.values(), *OTHERS), *far_positions())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_batches(target, case):
    runner.check(build(case, device=target.device), backend=target.backend)


@every_option
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_single(target, case, options):
    inputs, out = check_single(target, dataclasses.replace(case, **options))
    own, _ = runner.single(inputs, backend=target.backend)
    assert own.dtype == inputs.case.dtype_o
    assert torch.equal(own.view(torch.uint8), out.view(torch.uint8))
