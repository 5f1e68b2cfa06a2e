"""With fixed_split_size or disable_split_kv a request has the bits that it has alone: its tiles may
have another shape beside other requests, and its operands another way into the products."""

import itertools
import random

import pytest
import torch
from backends import on_every_backend
from fuzz import problems, wrapper_trial
from fuzz.problems import Also, Call, Copies, Problem
from preflash.testing import Case, MaskKind
from preflash.testing.case import Position

pytestmark = pytest.mark.gpu

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
SPLITS = ({"fixed_split_size": 64}, {"disable_split_kv": True})
# Short requests alone take short tiles; beside a long one they take its tall ones.
LENGTHS = (((9, 2, 14), (128, 130, 0)), ((3, 150, 1, 20), (300, 333, 70, 257)))

# Seen to differ: keys that fa2 rotates in tiles of 256 and of 128 threads.
SEEN = (
    "qo_lens=9,2,14 kv_lens=128,128,0 num_qo_heads=14 num_kv_heads=2 dtype=f16 sm_scale=-1.0 "
    "fixed_split_size=64 position=ROPE_LLAMA rope_theta=50.0 copies=never also=alone "
    "seed=228145219",
    "qo_lens=9,70 kv_lens=300,300 num_qo_heads=4 num_kv_heads=2 head_dim=256 dtype=f16 "
    "fixed_split_size=64 position=ROPE_LLAMA copies=never also=alone seed=3",
)


def check(problem, backend):
    verdict = wrapper_trial.examine(problem, backend=backend, device="cuda")
    if verdict.not_compiled:
        pytest.skip(verdict.not_compiled)
    assert verdict.failures == []


@pytest.mark.parametrize("lengths", LENGTHS, ids=["short", "mixed"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@on_every_backend
def test_requests_have_the_bits_that_they_have_alone(backend, options, dims, lengths):
    rng = random.Random(f"{options} {dims} {lengths}")
    for split, copies in itertools.product(SPLITS, (Copies.AUTO, Copies.NEVER)):
        case = Case(
            "invariance",
            *lengths,
            *rng.choice([(14, 2), (4, 2), (3, 3)]),
            dims[0],
            head_dim_vo=dims[1],
            page_size=rng.choice([0, 1, 16]),
            dtype=rng.choice([torch.float16, torch.bfloat16]),
            **{"mask": MaskKind.CAUSAL} | OPTIONS[options] | split,
        )
        check(Problem(case, Call(copies=copies), Also.ALONE, rng.randrange(2**31)), backend)


@pytest.mark.parametrize("text", SEEN)
@on_every_backend
def test_what_was_seen_to_differ(backend, text):
    check(problems.parse(text), backend)
