"""ALiBi, RoPE, sinks and fp8 over head dims, masks and single requests, against the oracle."""

import dataclasses
import itertools

import pytest
import torch
from dims_and_singles import DIMS, SINGLE, check_single, grid
from preflash.testing import Case, KvForm, Magnitude, MaskKind, Position, Sinks, build, runner

ALIBI, ROPE = Position.ALIBI, Position.ROPE
CAUSAL, NONE = MaskKind.CAUSAL, MaskKind.NONE
HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# dtypes of q, of k and v, and of the output
DTYPES = {
    "f16_e4m3": (HALF, E4M3, None),
    "f16_e5m2": (HALF, E5M2, None),
    "bf16_e4m3": (BFLOAT, E4M3, None),
    "bf16_e5m2": (BFLOAT, E5M2, None),
    "e4m3": (E4M3, None, None),
    "e4m3_to_bf16": (E4M3, E4M3, BFLOAT),
    "e4m3_to_f16": (E4M3, None, HALF),
    "e4m3_to_e4m3": (E4M3, None, E4M3),
}
FP8 = {
    name: {"dtype": q, "kv_dtype": kv, "o_dtype": out, "head_scales": True}
    for name, (q, kv, out) in DTYPES.items()
}
# Changes of a case, by option.
POSITIONS = {
    "alibi": {"position": ALIBI},
    "rope": {"position": ROPE, "rope_scale": 8.0, "rope_theta": 5e5},
    "rope_with_sinks": {"position": ROPE, "sinks": Sinks.MIXED},
}
OTHERS = ({"position": ROPE, "rope_scale": 0.25}, {"sinks": Sinks.ORDINARY})
OPTIONS = POSITIONS | {name: FP8[name] for name in ("f16_e5m2", "e4m3")}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def sinks_counted_once():
    """Eleven chunks or one, also with a bias of each head that the sink does not get."""
    splits, sizes = ({"disable_split_kv": True}, {"fixed_split_size": 64}), itertools.cycle((0, 16))
    for sinks, split, position in itertools.product(Sinks, splits, Position):
        case = Case("once", (1, 9), (700, 300), 6, 3, 64, page_size=next(sizes), sinks=sinks)
        yield dataclasses.replace(case, position=position, **split)


def head_counts():
    """ALiBi has slopes between those of a power of two; a tile of packed rows may begin anywhere in
    a token."""
    for heads in ((1, 1), (3, 3), (5, 1), (12, 4), (24, 8), (70, 1)):
        yield Case("heads", (29, 1), (77, 131), *heads, 64, page_size=5, position=ALIBI)
        for options in POSITIONS.values():
            yield Case("heads", (29, 1), (77, 131), *heads, 64, mask=CAUSAL, **options)


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


def others():
    for dim, page_size in zip((8, 24, 40, 72, 104, 136, 248), itertools.cycle((0, 5))):
        # d is rotated with d + D / 2, whatever size the kernel was compiled for.
        case = Case("dim", (9, 66), (77, 131), 4, 2, dim, form=KvForm.PADDED, mask=CAUSAL)
        yield dataclasses.replace(case, page_size=page_size, position=ROPE)
    for scale in (0.4, -0.2, 0.0, 1e-30):  # which the bias does not get
        case = Case("scale", (40, 3), (77, 131), 6, 2, 64, sm_scale=scale, mask=CAUSAL)
        yield dataclasses.replace(case, position=ALIBI)
    # A cap far below the biases of far keys.
    yield Case("cap", (40, 3), (300, 131), 4, 2, 128, soft_cap=0.5, position=ALIBI)
    case = Case("negative", (20, 70), (77, 300), 4, 2, 64, magnitude=Magnitude.VERY_NEGATIVE)
    yield dataclasses.replace(case, sm_scale=1.0, mask=CAUSAL, position=ALIBI)
    case = Case("position", (9, 66, 3), (77, 131, 0), 6, 2, 64, page_size=8, mask=CAUSAL)
    for options, position in itertools.product(FP8.values(), (ALIBI, ROPE)):
        yield dataclasses.replace(case, position=position, sinks=Sinks.MIXED, **options)
    lengths = ((1, 70, 0, 33), (40, 131, 9, 33))
    for options, dims in itertools.product(FP8.values(), DIMS.items()):
        yield Case("fp8", *lengths, 6, 2, *dims, mask=CAUSAL, **options)


# Five options take turns: with twelve masks and caps, each meets most of them at some head dim.
CASES = (*grid(*POSITIONS.values(), *OTHERS), *sinks_counted_once(), *head_counts(),
         *far_positions(), *others())  # fmt: skip


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
