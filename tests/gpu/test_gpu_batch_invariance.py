"""With fixed_split_size or disable_split_kv a request has the bits that it has alone: its tiles may
have another shape beside other requests, and its operands another way into the products."""

import itertools
import random

import preflash
import pytest
import torch
from backends import on_every_backend
from fuzz import problems, wrapper_trial
from fuzz.problems import Also, Call, Copies, Problem
from preflash.testing import Case, MaskKind, runner
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
LENGTHS = {
    "short": ((9, 2, 14), (128, 130, 0)),
    "mixed": ((3, 150, 1, 20), (300, 333, 70, 257)),
    "long": ((1, 300, 7, 16, 0), (2000, 700, 333, 16, 50)),
}

# Seen to differ: keys that fa2 rotates in tiles of 256 and of 128 threads.
SEEN = (
    "qo_lens=9,2,14 kv_lens=128,128,0 num_qo_heads=14 num_kv_heads=2 dtype=f16 sm_scale=-1.0 "
    "fixed_split_size=64 position=ROPE_LLAMA rope_theta=50.0 copies=never also=alone "
    "seed=228145219",
    "qo_lens=9,70 kv_lens=300,300 num_qo_heads=4 num_kv_heads=2 head_dim=256 dtype=f16 "
    "fixed_split_size=64 position=ROPE_LLAMA copies=never also=alone seed=3",
)


def drawn(rng, lengths, dims, page_size, options) -> Case:
    heads = rng.choice([(14, 2), (4, 2), (3, 3)])
    dtype = rng.choice([torch.float16, torch.bfloat16])
    options = {"mask": MaskKind.CAUSAL, "page_size": page_size} | options
    return Case("invariance", *lengths, *heads, *dims, dtype, **options)


def check(problem, backend):
    verdict = wrapper_trial.examine(problem, backend=backend, device="cuda")
    if verdict.not_compiled:
        pytest.skip(verdict.not_compiled)
    assert verdict.failures == []


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@on_every_backend
def test_requests_have_the_bits_that_they_have_alone(backend, options, dims, lengths):
    rng = random.Random(f"{options} {dims} {lengths}")
    for split, copies in itertools.product(SPLITS, (Copies.AUTO, Copies.NEVER)):
        page_size = rng.choice([0, 1, 16])
        case = drawn(rng, lengths, dims, page_size, OPTIONS[options] | split)
        check(Problem(case, Call(copies=copies), Also.ALONE, rng.randrange(2**31)), backend)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", ["plain", "soft_cap", "rope", "e4m3", "rope_e4m3", "window"])
@on_every_backend
def test_chunks_and_decode_steps_have_the_bits_of_the_prefill(backend, options, dims):
    """With few keys no rounding to 16 bits hides another order of adding up."""
    rng = random.Random(f"{options} {dims}")
    lengths, call = ((13, 21, 6), (13, 70, 6)), Call(copies=Copies.NEVER)
    for split, page_size in itertools.product(SPLITS, (0, 1, 16, 48)):
        case = drawn(rng, lengths, dims, page_size, OPTIONS[options] | split)
        check(Problem(case, call, Also.INVARIANT, rng.randrange(2**31)), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, E4M3])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@on_every_backend
def test_pages_do_not_matter(backend, dims, dtype):
    d, d_vo = dims[0], dims[1] or dims[0]
    generator = torch.Generator().manual_seed(5)
    for kv_len in (5, 27, 64, 130, 203):
        q, k, v = (
            torch.randn(*shape, generator=generator).to(dtype).cuda()
            for shape in ((5, 4, d), (kv_len, 2, d), (kv_len, 2, d_vo))
        )
        ragged, *paged = (computed(backend, q, k, v, size) for size in (0, 1, 8, 16, 64, 256))
        assert all(torch.equal(out, ragged) for out in paged), kv_len


def computed(backend, q, k, v, page_size):
    """Computes a batch of one request with a batch-invariant plan."""
    workspace = runner.workspace("cuda", 1 << 20)
    options = {
        "causal": True, "q_data_type": q.dtype, "kv_data_type": k.dtype, "batch_invariant": True,
        "o_data_type": torch.bfloat16 if q.dtype == E4M3 else q.dtype, "head_dim_vo": v.shape[-1],
    }  # fmt: skip
    heads = (q.shape[1], k.shape[1], q.shape[2])
    qo_indptr = torch.tensor([0, len(q)], dtype=torch.int32)
    try:
        if page_size == 0:
            wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
            kv_indptr = torch.tensor([0, len(k)], dtype=torch.int32)
            wrapper.plan(qo_indptr, kv_indptr, *heads, **options)
            return wrapper.run(q, k, v)
        wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        count = -(-len(k) // page_size)
        indices = torch.arange(count - 1, -1, -1, dtype=torch.int32)
        last = torch.tensor([len(k) - (count - 1) * page_size], dtype=torch.int32)
        kv_indptr = torch.tensor([0, count], dtype=torch.int32)
        wrapper.plan(qo_indptr, kv_indptr, indices.cuda(), last, *heads, page_size, **options)
    except NotImplementedError as error:
        pytest.skip(str(error))
    cache = [torch.zeros(count * page_size, *x.shape[1:], dtype=x.dtype).cuda() for x in (k, v)]
    for rows, x in zip(cache, (k, v), strict=True):
        rows.view(torch.uint8)[: len(x)] = x.view(torch.uint8)
    pages = [rows.view(count, page_size, *rows.shape[1:]).flip(0) for rows in cache]
    return wrapper.run(q, tuple(pages))


@pytest.mark.parametrize("text", SEEN)
@on_every_backend
def test_what_was_seen_to_differ(backend, text):
    check(problems.parse(text), backend)
