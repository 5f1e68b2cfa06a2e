"""ALiBi and RoPE are compared with sums by hand, and change from plan to plan and call to call."""

import dataclasses
import math

import preflash
import pytest
import torch
from planned_cases import planned
from preflash.testing import Case, Magnitude, MaskKind, Position, build, reference, runner
from preflash.testing.oracle import Rope

ALIBI, ROPE = Position.ALIBI, Position.ROPE


def test_alibi_counts_from_the_local_row(target):
    """With q = 0 the logits are slope * (j - i), i the row within its request."""
    case = Case("zero_q", (5, 3), (40, 7), 6, 2, 64, page_size=16, position=ALIBI)
    inputs, wrapper = planned(case, target)
    inputs.q.zero_()
    for lse_base, unit in (("log2", math.log2(math.e)), ("ln", 1.0)):
        _, lse = runner.run(wrapper, inputs, lse_base=lse_base)
        for head, slope in enumerate([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]):
            wanted = [
                unit * math.log(sum(math.exp(slope * (key - row)) for key in range(kv_len)))
                for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True)
                for row in range(qo_len)
            ]
            torch.testing.assert_close(
                lse[:, head].cpu(), torch.tensor(wanted), rtol=1e-6, atol=1e-4
            )


@pytest.mark.parametrize("row_is_key", [True, False])
def test_rope_by_hand(target, row_is_key):
    """q and k of one dimension: the logit is the cosine of the angle between the positions."""
    dim, pair, rows, keys = 64, 5, 3, 40
    q = torch.zeros(rows, 2, dim, dtype=torch.float16)
    k, v = torch.zeros(2, keys, 2, dim, dtype=torch.float16)
    q[..., pair if row_is_key else pair + dim // 2] = 1.0
    k[..., pair] = 1.0
    _, lse = preflash.single_prefill_with_kv_cache(
        *map(target.to, (q, k, v)), sm_scale=1.0, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0,
        rope_theta=100.0, return_lse=True, lse_base="ln", backend=target.backend,
    )  # fmt: skip
    step = 100.0 ** (-2 * pair / dim) / 2.0
    for row in range(rows):
        angles = [step * (keys - rows + row - key) for key in range(keys)]
        # The unit vector of d + D / 2 is a quarter turn ahead of that of d.
        logits = [math.cos(a) if row_is_key else -math.sin(a) for a in angles]
        wanted = math.log(sum(map(math.exp, logits)))
        # A GPU multiplies rotated rows in float16: each has half an ulp, 2^-11 of itself.
        rounding = 1e-5 if target.backend == "cpu" else 2.0**-10
        assert lse[row].tolist() == pytest.approx([wanted, wanted], abs=rounding)


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
