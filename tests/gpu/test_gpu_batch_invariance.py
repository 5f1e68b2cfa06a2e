"""With fixed_split_size or disable_split_kv a request has the bits that it has alone."""

import itertools
import random

import pytest
import torch
from backends import planned
from fuzz import wrapper_trial
from fuzz.problems import Also, Brought, Call, Copies, Problem, checks
from preflash.testing import Case, MaskKind, Position, runner

E4M3 = torch.float8_e4m3fn
OPTIONS = {
    "plain": {},
    "soft_cap": {"soft_cap": 20.0},
    "alibi": {"position": Position.ALIBI},
    "rope": {"position": Position.ROPE, "rope_theta": 50.0},
    "e4m3": {"kv_dtype": E4M3},
    "rope_e4m3": {"position": Position.ROPE, "kv_dtype": E4M3},
    "mask": {"mask": MaskKind.CUSTOM},
    "window": {"window_left": 90},
}
HEAD_DIMS = ((64, None), (128, None), (192, 128), (256, None), (512, None), (80, None))
on_head_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
SPLITS = ({"fixed_split_size": 64}, {"disable_split_kv": True})
# Short requests alone take short tiles; beside a long one they take its tall ones. With few keys no
# rounding to 16 bits hides another order of adding up.
LENGTHS = {
    "few keys": ((13, 21, 6), (13, 70, 6)),
    "short": ((9, 2, 14), (128, 130, 0)),
    "mixed": ((3, 150, 1, 20), (300, 333, 70, 257)),
    "long": ((1, 300, 7, 16, 0), (2000, 700, 333, 16, 50)),
}


def drawn(rng, lengths, dims, options) -> Case:
    heads = rng.choice([(14, 2), (4, 2), (3, 3)])
    dtype = rng.choice([torch.float16, torch.bfloat16])
    options = {"mask": MaskKind.CAUSAL, "page_size": rng.choice([0, 1, 16, 48])} | options
    return Case("invariance", *lengths, *heads, *dims, dtype, **options)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_head_dims
@pytest.mark.parametrize("options", OPTIONS)
def test_requests_and_their_parts_have_the_bits_that_they_have_alone(
    backend, options, dims, lengths
):
    """Parts are chunks and decode steps. Memory between the rows of the outputs stays as it was."""
    rng = random.Random(f"{options} {dims} {lengths}")
    for split, copies in itertools.product(SPLITS, (Copies.AUTO, Copies.NEVER)):
        case = drawn(rng, lengths, dims, OPTIONS[options] | split)
        call = Call(copies=copies, out=Brought.STRIDED, lse=Brought.STRIDED)
        also = Also.INVARIANT if Also.INVARIANT in checks(case, call) else Also.ALONE
        problem = Problem(case, call, also, rng.randrange(2**31))
        verdict = wrapper_trial.examine(problem, backend=backend, device="cuda")
        if verdict.not_compiled:
            pytest.skip(verdict.not_compiled)
        assert verdict.failures == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, E4M3])
@on_head_dims
def test_pages_do_not_matter(backend, dims, dtype):
    how = {"mask": MaskKind.CAUSAL, "batch_invariant": True}
    for kv_len in (5, 27, 64, 130, 203):
        outs = []
        for page_size in (0, 1, 8, 16, 64, 256):
            case = Case("pages", (5,), (kv_len,), 4, 2, *dims, dtype, page_size, **how)
            outs.append(runner.run(*planned(case, backend))[0])
        assert all(torch.equal(out, outs[0]) for out in outs), kv_len
