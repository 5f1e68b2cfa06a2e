"""ALiBi and RoPE change from plan to plan and call to call; test_cases.py has their cases."""

import dataclasses

import pytest
from planned_cases import planned
from preflash.testing import Case, Magnitude, MaskKind, Position, build, reference, runner
from preflash.testing.oracle import Rope, alibi_slopes

ALIBI, ROPE = Position.ALIBI, Position.ROPE


def test_slopes_of_heads_that_are_no_power_of_two():
    """Kernels are compared with these by every case of ALiBi."""
    assert alibi_slopes(6).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_very_negative_logits_of_rope(target):
    case = Case("negative", (20, 70), (77, 300), 4, 2, 64, magnitude=Magnitude.VERY_NEGATIVE,
                sm_scale=1e-3, mask=MaskKind.CAUSAL, position=ROPE)  # fmt: skip
    inputs, wrapper = planned(case, target)
    # Rotated products are not exact: they are rounded as ordinary numbers are.
    runner.compare(inputs, *runner.run(wrapper, inputs), logit_rounding=32.0).check()


def check_pipeline(inputs, result, **changes) -> None:
    """Compares a result with the oracle's for another slope or rotation."""
    pipeline = dataclasses.replace(inputs.pipeline, **changes)
    case = dataclasses.replace(inputs.case, position=ROPE if pipeline.rope else Position.NONE)
    planned_for = dataclasses.replace(inputs, case=case)  # GPUs round what they rotate
    runner.compare(planned_for, *result, reference(inputs, pipeline=pipeline)).check()


@pytest.mark.parametrize("page_size", [0, 16])
def test_positions_planned_again(target, page_size):
    """Each plan() sets the encoding and its frequencies."""
    case = Case("again", (9, 3), (30, 5), 4, 2, 64, page_size=page_size)
    inputs, wrapper = planned(case, target)
    slopes = build(dataclasses.replace(case, position=ALIBI)).pipeline.slopes
    for mode, rope in (("ALIBI", None), ("ROPE_LLAMA", Rope()), ("NONE", None),
                       ("ROPE_LLAMA", Rope(8.0, 5e5)), ("ROPE_LLAMA", Rope(8.0)), ("ALIBI", None),
                       ("NONE", None)):  # fmt: skip
        options = {} if rope is None else {"rope_scale": rope.scale, "rope_theta": rope.theta}
        runner.plan(wrapper, inputs, pos_encoding_mode=mode, **options)
        changes = {"rope": rope, "slopes": slopes if mode == "ALIBI" else None}
        check_pipeline(inputs, runner.run(wrapper, inputs), **changes)


def test_forward_has_its_own_frequencies(target):
    """The defaults of the deprecated call replace the frequencies of plan()."""
    case = Case("forward", (9, 3), (30, 5), 4, 2, 64, position=ROPE, mask=MaskKind.CAUSAL)
    inputs, wrapper = planned(case, target, rope_theta=77.0)
    llama = {"pos_encoding_mode": "ROPE_LLAMA"}
    others = {**llama, "rope_scale": 2, "rope_theta": 5e5}
    for rope, options in ((Rope(), llama), (Rope(2.0, 5e5), others), (None, {})):
        tensors = (inputs.q, inputs.k, inputs.v)
        result = wrapper.forward_return_lse(*tensors, causal=True, **options)
        check_pipeline(inputs, result, rope=rope)


def test_single_requests_keep_their_frequencies_apart(target):
    """Plans of single requests are remembered."""
    inputs = build(Case("apart", (9,), (30,), 4, 2, 64, position=ROPE), device=target.device)
    for rope in (Rope(), Rope(2.0), Rope(2.0, 50.0), Rope()):
        options = {"rope_scale": rope.scale, "rope_theta": rope.theta}
        check_pipeline(inputs, runner.single(inputs, backend=target.backend, **options), rope=rope)
