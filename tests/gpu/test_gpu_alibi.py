"""ALiBi over long requests, where far keys lose their weight, and where some of them keep it."""

import itertools
import math

import pytest
import torch
from backends import backends_and_cases, on_every_backend, planned
from preflash.testing import Case, MaskKind, Position, Sinks, build, runner

pytestmark = pytest.mark.gpu

BFLOAT, HALF = torch.bfloat16, torch.float16
LENS = (300, 1, 129, 65, 70), (3000, 900, 1290, 2222, 64)
DIMS = ((64, None), (128, None), (192, 128), (256, None), (120, 72))
HEADS = ((16, 16), (8, 2), (6, 3), (16, 1), (20, 1), (64, 8), (1, 1), (5, 5))
MASKS = ((MaskKind.NONE, -1), (MaskKind.CAUSAL, -1), (MaskKind.CAUSAL, 700), (MaskKind.NONE, 1500))


def long_requests():
    """Dims and heads by masks; everything else takes turns."""
    turns = itertools.cycle(
        itertools.product((0, 16, 5), (None, 512), (BFLOAT, HALF), (Sinks.NONE, Sinks.MIXED))
    )
    turn_of_dim = itertools.cycle(DIMS)
    for (num_qo_heads, num_kv_heads), (mask, window_left) in itertools.product(HEADS, MASKS):
        page_size, split, dtype, sinks = next(turns)
        sizes = (num_qo_heads, num_kv_heads, *next(turn_of_dim), dtype, page_size)
        how = {"mask": mask, "window_left": window_left, "fixed_split_size": split}
        yield Case("long", *LENS, *sizes, **how, position=Position.ALIBI, sinks=sinks)


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(long_requests()))
def test_long_requests(backend, case):
    runner.check(build(case, device="cuda"), backend=backend)


@on_every_backend
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [MaskKind.NONE, MaskKind.CAUSAL], ids=lambda mask: mask.value)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(("logit", "every"), [(20.0, 100), (60.0, 700), (60.0, 100), (300.0, 1000)])
def test_far_keys_that_stand_out(backend, logit, every, rows, mask, dim):
    """A bias of any size loses to a logit above it, in one row of a tile alone, too."""
    case = Case("raised", (300, 65), (3000, 2222), 8, 2, dim, mask=mask, position=Position.ALIBI)
    inputs = build(case, device="cuda")
    # One row in `rows` raises every `every`-th key by `logit` over the others.
    inputs.q[..., 0] = 0.0
    inputs.q[::rows, :, 0] = 8.0
    inputs.k[..., 0] = 0.0
    inputs.k[3::every, :, 0] = logit * math.sqrt(dim) / 8.0
    runner.check(inputs, backend=backend)


@on_every_backend
def test_a_far_key_of_nan_is_no_weightless_one(backend):
    """A NaN key that a row keeps reaches it: a comparison that NaN fails would skip its tile."""
    case = Case("nan", (130,), (4000,), 2, 2, 128, mask=MaskKind.CAUSAL, position=Position.ALIBI)
    wrapper, inputs = planned(case, backend)
    inputs.k[100, 0] = math.nan
    out, lse = runner.run(wrapper, inputs)
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()
