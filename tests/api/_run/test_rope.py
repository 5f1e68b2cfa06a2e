"""pos_encoding_mode="ROPE_LLAMA": queries and keys are rotated by their positions in the kernel."""

import dataclasses
import math

import preflash
import pytest
import torch
from dims_and_singles import SINGLE, check_single, grid, on_split_keys
from preflash.testing import (
    Case,
    KvForm,
    Magnitude,
    MaskKind,
    Position,
    Sinks,
    build,
    reference,
    runner,
)
from preflash.testing.oracle import Rope

ROPE = Position.ROPE
CAUSAL = MaskKind.CAUSAL
HALF, BFLOAT = torch.float16, torch.bfloat16


FREQUENCIES_IN_TURN = [
    {},
    {"rope_scale": 8.0, "rope_theta": 5e5},
    {"rope_scale": 0.25},
]


@pytest.mark.parametrize(
    "case", list(grid(*FREQUENCIES_IN_TURN, position=ROPE)), ids=lambda case: case.id
)
def test_batches(target, case):
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("dim", [8, 24, 40, 72, 104, 136, 248])
def test_pairs_are_those_of_the_actual_head_dim(target, dim, page_size):
    """d turns with d + D / 2, whatever size the kernel was compiled for."""
    case = Case("dim", (9, 66), (77, 131), 4, 2, dim, form=KvForm.PADDED, mask=CAUSAL)
    case = dataclasses.replace(case, page_size=page_size, position=ROPE)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (5, 1), (12, 4), (17, 1), (70, 1)], ids=str)
def test_head_counts(target, heads):
    """Every head of a token has the token's position, wherever a tile of packed rows begins."""
    case = Case("heads", (29, 1), (77, 131), *heads, 64, mask=CAUSAL, position=ROPE)
    runner.check(build(case, device=target.device), backend=target.backend)


@on_split_keys
def test_split_keys(target, qo_lens, kv_lens, mask, split, dtype):
    case = Case("split", qo_lens, kv_lens, 6, 2, 128, dtype=dtype, page_size=16, mask=mask)
    case = dataclasses.replace(case, position=ROPE, fixed_split_size=split, sinks=Sinks.MIXED)
    runner.check(build(case, device=target.device), backend=target.backend)


@pytest.mark.parametrize(
    "lengths",
    [((0, 20, 5, 0, 0, 3), (40, 0, 9, 0, 7, 130)), ((0, 0), (0, 0)), ((150, 300), (64, 1))],
    ids=["some_zero", "all_empty", "negative_positions"],
)
@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("mask", [MaskKind.NONE, CAUSAL], ids=lambda mask: mask.value)
def test_lengths(target, lengths, page_size, mask):
    case = Case("lengths", *lengths, 4, 2, 64, page_size=page_size, mask=mask, position=ROPE)
    runner.check(build(case, device=target.device), backend=target.backend)


FREQUENCIES = {"causal": {"rope_theta": 5e5}, "custom": {"rope_scale": 4.0}}


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_single(target, case, dtype):
    case = dataclasses.replace(case, dtype=dtype, position=ROPE, **FREQUENCIES.get(case.name, {}))
    check_single(target, case)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_far_positions(target, page_size, scale):
    """Angles of 2^17 radians and more, of which float32 would know two digits after the point.

    A scale of 1/3 has a float32 neighbour that is off by as much there."""
    case = Case("far", (1, 40), (140_000, 77), 4, 1, 64, page_size=page_size, mask=CAUSAL)
    # Few keys weigh, and much: what their logits are off by stays visible.
    case = dataclasses.replace(case, window_left=40, sm_scale=0.5)
    case = dataclasses.replace(case, position=ROPE, rope_scale=scale)
    runner.check(build(case, device=target.device), backend=target.backend)


def test_far_positions_single(target):
    case = Case("far", (3,), (200_001,), 3, 1, 64, dtype=HALF, window_left=40, sm_scale=0.5)
    case = dataclasses.replace(case, position=ROPE, rope_theta=1e6)
    inputs = build(case, device=target.device)
    runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


def test_very_negative_logits(target):
    case = Case("negative", (20, 70), (77, 300), 4, 2, 64, magnitude=Magnitude.VERY_NEGATIVE)
    # Turned, products are no longer exact: as ordinary numbers are rounded.
    case = dataclasses.replace(case, sm_scale=1e-3, mask=CAUSAL, position=ROPE)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs), logit_rounding=32.0).check()


# ---- by hand


@pytest.mark.parametrize("row_is_key", [True, False])
def test_logits_by_hand(target, row_is_key):
    """q and k of one dimension: the logit is the cosine of the angle between the positions."""
    dim, pair, rows, keys = 64, 5, 3, 40
    q = torch.zeros(rows, 2, dim, dtype=HALF)
    k = torch.zeros(keys, 2, dim, dtype=HALF)
    q[..., pair if row_is_key else pair + dim // 2] = 1.0
    k[..., pair] = 1.0
    v = torch.zeros(keys, 2, dim, dtype=HALF)
    _, lse = preflash.single_prefill_with_kv_cache(
        *(target.to(x) for x in (q, k, v)),
        sm_scale=1.0,
        pos_encoding_mode="ROPE_LLAMA",
        rope_scale=2.0,
        rope_theta=100.0,
        return_lse=True,
        lse_base="ln",
        backend=target.backend,
    )
    step = 100.0 ** (-2 * pair / dim) / 2.0
    for row in range(rows):
        angles = [step * (keys - rows + row - key) for key in range(keys)]
        # The unit vector of d + D / 2 is a quarter turn ahead of that of d.
        logits = [math.cos(a) if row_is_key else -math.sin(a) for a in angles]
        wanted = math.log(sum(map(math.exp, logits)))
        # A GPU multiplies rotated rows in float16: each of both has half an ulp, 2^-11 of itself.
        rounding = 1e-5 if target.backend == "cpu" else 2.0**-10
        assert lse[row].tolist() == pytest.approx([wanted, wanted], abs=rounding)


@pytest.mark.parametrize("page_size", [0, 16])
def test_planned_again(target, page_size):
    """Each plan() says which encoding counts; on a GPU the variant tells."""
    case = Case("again", (9, 3), (30, 5), 4, 2, 64, page_size=page_size, position=ROPE)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for rope in (Rope(), None, Rope(8.0, 5e5), Rope(8.0)):
        options = {"pos_encoding_mode": "NONE"}
        if rope is not None:
            options = {"rope_scale": rope.scale, "rope_theta": rope.theta}
        runner.plan(wrapper, inputs, **options)
        if target.backend != "cpu":  # whose one kernel rotates where it is asked to
            assert ("converted" in wrapper.variant) == (rope is not None)
        pipeline = dataclasses.replace(inputs.pipeline, rope=rope)
        expected = reference(inputs, pipeline=pipeline)
        runner.compare(inputs, *runner.run(wrapper, inputs), expected).check()


def test_forward_asks_for_itself(target):
    """The deprecated call has frequencies of its own, and its defaults replace those of plan()."""
    case = Case("forward", (9, 3), (30, 5), 4, 2, 64, position=ROPE, mask=CAUSAL)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, rope_theta=77.0)
    tensors = (inputs.q, inputs.k, inputs.v)
    for rope, options in (
        (Rope(), {"pos_encoding_mode": "ROPE_LLAMA"}),
        (Rope(2.0, 5e5), {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2, "rope_theta": 5e5}),
        (None, {}),
    ):
        result = wrapper.forward_return_lse(*tensors, causal=True, **options)
        expected = reference(inputs, pipeline=dataclasses.replace(inputs.pipeline, rope=rope))
        runner.compare(inputs, *result, expected).check()


def test_single_requests_keep_their_frequencies_apart(target):
    """Plans of single requests are remembered; 1, 1.0 and True are equal keys of a dict."""
    case = Case("apart", (9,), (30,), 4, 2, 64, position=ROPE)
    inputs = build(case, device=target.device)
    for rope in (Rope(), Rope(2.0), Rope(2.0, 50.0), Rope()):
        result = runner.single(
            inputs, backend=target.backend, rope_scale=rope.scale, rope_theta=rope.theta
        )
        expected = reference(inputs, pipeline=dataclasses.replace(inputs.pipeline, rope=rope))
        runner.compare(inputs, *result, expected).check()
    with pytest.raises(TypeError, match="rope_scale"):
        runner.single(inputs, backend=target.backend, rope_scale=True)


REFUSED = {
    "scale_zero": ({"rope_scale": 0.0}, ValueError, "rope_scale=0.0: must be positive"),
    "scale_negative": ({"rope_scale": -1.0}, ValueError, "rope_scale=-1.0: must be positive"),
    "theta_infinite": ({"rope_theta": math.inf}, ValueError, "rope_theta=inf: must be finite"),
    "theta_nan": ({"rope_theta": math.nan}, ValueError, "rope_theta=nan: must be finite"),
    "theta_text": ({"rope_theta": "1e4"}, TypeError, "rope_theta must be a float"),
    "scale_tiny": ({"rope_scale": 1e-5}, ValueError, "rope_scale=1e-05 .*radians"),
    "theta_tiny": ({"rope_theta": 1e-9}, ValueError, "rope_theta=1e-09: .*radians"),
    "none": ({"pos_encoding_mode": "NONE", "rope_theta": 5e5}, ValueError, "only .*'ROPE_LLAMA'"),
    "alibi": ({"pos_encoding_mode": "ALIBI", "rope_scale": 2.0}, ValueError, "it is 'ALIBI'"),
}


@pytest.mark.parametrize(("options", "error", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, error, why):
    case = Case("refused", (9,), (30,), 4, 2, 64, position=ROPE)
    inputs = build(case)
    wrapper = runner.make_wrapper(case, backend="cpu")
    runner.plan(wrapper, inputs)
    with pytest.raises(error, match=why):
        runner.plan(wrapper, inputs, **options)
    with pytest.raises(error, match=why):
        runner.single(inputs, backend="cpu", **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("mode", ["NONE", "ALIBI"])
def test_neutral_frequencies_are_taken_everywhere(target, mode):
    case = Case("neutral", (9,), (30,), 4, 2, 64, position=Position(mode))
    inputs = build(case, device=target.device)
    result = runner.single(inputs, backend=target.backend, rope_scale=1.0, rope_theta=1e4)
    runner.compare(inputs, *result).check()
