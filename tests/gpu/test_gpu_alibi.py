"""ALiBi over long requests, where far keys lose their weight, and where some of them keep it."""

import itertools
import math

import pytest
import torch
from backends import on_cases, planned
from preflash.testing import Case, MaskKind, Position, Sinks, build, runner

BFLOAT, HALF = torch.bfloat16, torch.float16
LENS = (300, 1, 129, 65, 70), (3000, 900, 1290, 2222, 64)
DIMS = ((64, None), (128, None), (192, 128), (256, None), (120, 72))
HEADS = ((16, 16), (8, 2), (6, 3), (16, 1), (20, 1), (64, 8), (1, 1), (5, 5))
MASKS = ((MaskKind.NONE, -1), (MaskKind.CAUSAL, -1), (MaskKind.CAUSAL, 700), (MaskKind.NONE, 1500))
# One row in so many raises every so many-th key by a logit over the others.
RAISED = [(1, 100, 20.0), (64, 700, 60.0), (1, 100, 60.0), (64, 1000, 300.0)]


def long_requests():
    """Heads by masks; everything else takes turns."""
    turns = itertools.cycle(
        itertools.product((0, 16, 5), (None, 512), (BFLOAT, HALF), (Sinks.NONE, Sinks.MIXED))
    )
    turn_of_dim = itertools.cycle(DIMS)
    for heads, (mask, window_left) in itertools.product(HEADS, MASKS):
        page_size, split, dtype, sinks = next(turns)
        sizes = (*heads, *next(turn_of_dim), dtype, page_size)
        how = {"mask": mask, "window_left": window_left, "fixed_split_size": split}
        yield Case("long", *LENS, *sizes, **how, position=Position.ALIBI, sinks=sinks)


@on_cases(long_requests())
@pytest.mark.parametrize("raised", [None, *RAISED], ids=str)
def test_long_requests(backend, raised, case):
    """A bias of any size loses to a logit above it, in one row of a tile alone, too."""
    inputs = build(case, device="cuda")
    if raised:
        rows, every, logit = raised
        keys = inputs.k.view(-1, *inputs.k.shape[-2:])
        inputs.q[..., 0], keys[..., 0] = 0.0, 0.0
        inputs.q[::rows, :, 0] = 8.0
        keys[3::every, :, 0] = logit / case.scale / 8.0
    runner.check(inputs, backend=backend)


def test_a_far_key_of_nan_is_no_weightless_one(backend):
    """A NaN key that a row keeps reaches it: a comparison that NaN fails would skip its tile."""
    case = Case("nan", (130,), (4000,), 2, 2, 128, mask=MaskKind.CAUSAL, position=Position.ALIBI)
    wrapper, inputs = planned(case, backend)
    inputs.k[100, 0] = math.nan
    out, lse = runner.run(wrapper, inputs)
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()
