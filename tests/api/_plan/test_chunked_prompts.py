"""Batch-invariant plans: a row of a long prompt depends on its own keys alone."""

import itertools

import pytest
import torch
from fuzz.altered_inputs import part, with_bounds
from planned_cases import bounds_of, tensors
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.inputs import pages_of

PAGE = 16
E4M3 = torch.float8_e4m3fn
# Ends of chunks, at and beside multiples of tiles of rows and of keys. The last is the prompt's.
CUTS = (1, 37, 128, 131, 400, 897, 911, 1024, 1300, 1301, 1336)
# Positions of single rows: decode steps.
STEPS = (0, 127, 128, 300, 1023, 1024, 1152, 1290, 1335)
OPTIONS = {
    "one pass": {"batch_invariant": True},
    "chunks of 512 keys": {"fixed_split_size": 512},
    "window": {"batch_invariant": True, "window_left": 700},
}
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])


def prompt(target, rows, keys, heads, head_dim, dtype, **options):
    """Builds a request of so many keys, and of queries at their end."""
    o_dtype = torch.float16 if dtype == E4M3 else None
    options = {"page_size": PAGE, "mask": MaskKind.CAUSAL, "o_dtype": o_dtype, **options}
    case = Case("prompt", (rows,), (keys,), *heads, head_dim, dtype=dtype, **options)
    return build(case, device=target.device, seed=head_dim + heads[0] + keys)


def places(inputs, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pages of these keys, and their places there."""
    table = torch.tensor(inputs.page_table[0], device=positions.device)
    return table[positions // PAGE], positions % PAGE


def computed(target, inputs, *, more_pages: int = 0):
    """(out, lse) of the request. more_pages: plan() knows an upper bound of so many pages more."""
    options = {}
    if more_pages:
        inputs, options = with_bounds(inputs, more_pages), bounds_of(inputs)
    wrapper = runner.planned(inputs, backend=target.backend, **options)
    return wrapper.run(*tensors(inputs), return_lse=True)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 1), (3, 3), (130, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@every_dtype
def test_chunks_and_decode_steps(target, dtype, head_dim, heads, kind):
    few = (torch.bfloat16, 64, "chunks of 512 keys")
    if target.device == "cpu" and heads == (130, 1) and (dtype, head_dim, kind) != few:
        pytest.skip("takes long on the CPU")
    inputs = prompt(target, CUTS[-1], CUTS[-1], heads, head_dim, dtype, **OPTIONS[kind])
    # A row's key as its neighbours' largest logit, so that references move after it.
    page, slot = places(inputs, torch.arange(CUTS[-1], device=target.device))
    ramp = torch.linspace(-8, 8, CUTS[-1], device=target.device)[:, None].expand(-1, heads[1])
    pages_of(inputs.k, inputs.case)[page, slot, :, 0] = ramp.to(dtype)
    whole = computed(target, inputs)
    chunks = [*itertools.pairwise((0, *CUTS)), *((step, step + 1) for step in STEPS)]
    for begin, end in chunks:
        for more_pages in (0, 13) if kind != "window" else (0,):
            chunk = computed(target, part(inputs, 0, begin, end), more_pages=more_pages)
            for given, expected in zip(chunk, whole, strict=True):
                assert torch.equal(given, expected[begin:end]), (begin, end, more_pages)


@every_dtype
@pytest.mark.parametrize("window_left", [2, 9, 30])
def test_keys_below_a_window_may_be_nan(target, window_left, dtype):
    """The first key in the window is anywhere in the last key's page, or in an earlier one."""
    options = {"batch_invariant": True, "window_left": window_left}
    for kv_len in range(100, 100 + PAGE):
        inputs = prompt(target, 1, kv_len, (8, 2), 128, dtype, **options)
        expected = computed(target, inputs)
        below = torch.arange(kv_len - 1 - window_left, device=target.device)
        for t in (inputs.k, inputs.v):
            pages_of(t, inputs.case)[places(inputs, below)] = float("nan")
        assert all(map(torch.equal, computed(target, inputs), expected)), kv_len
