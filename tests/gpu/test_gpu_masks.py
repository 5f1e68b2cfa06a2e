"""Custom masks with a structure: tiles that keep all, nothing or something, rows without a key, and
rows whose keys come late."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import preflash
import prepass_policy
import pytest
import torch
import wrapper_options
from backends import (
    GPU_BACKENDS,
    assert_twenty_runs_are_equal,
    captured,
    check_run,
    on_every_backend,
    sleep,
)
from preflash.testing import Case, MaskKind, Position, Sinks, build, runner

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)]
LENS = (300, 70, 1, 0, 9), (700, 1211, 513, 40, 0)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONVERTED = {
    "rope": {"position": Position.ROPE},
    "e4m3": {"kv_dtype": E4M3},
    "e5m2": {"kv_dtype": E5M2, "dtype": torch.float16},
    "rope_e4m3": {"position": Position.ROPE, "kv_dtype": E4M3},
    "e4m3_queries": {"dtype": E4M3},
}
LOADS = {"direct": {}, **CONVERTED}
on_every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)

# Whether row i keeps key j; delta: of the diagonal of causal.
SHAPES = {
    "causal": lambda i, j, delta, keys: j <= i + delta,
    # Packed sequences that do not see each other.
    "blocks": lambda i, j, delta, keys: (i + delta) // 96 == j // 96,
    # Drafts after a prompt: each sees the prompt and its ancestors.
    "tree": lambda i, j, delta, keys: (j < delta) | ((j <= i + delta) & ((i + delta - j) % 7 == 0)),
    # Rows without a key beside others, and tiles without a key between others.
    "stripes": lambda i, j, delta, keys: (i % 3 != 1) & (j // 200 % 2 == 1),
    # The tiles that a loop from the last key meets first keep nothing.
    "first_keys": lambda i, j, delta, keys: (j < 3) & (i >= 0),
    # Each row sees a part of the keys: rows get their first one at different times.
    "ladder": lambda i, j, delta, keys: j * 7 // max(keys, 1) == i % 7,
    "nothing": lambda i, j, delta, keys: (j < 0) & (i < 0),
    "everything": lambda i, j, delta, keys: (j >= 0) & (i >= 0),
    "sparse": lambda i, j, delta, keys: (i * 40503 + j * 30011) % 977 == 0,
    # Tiles of 48 keys that keep all or nothing, and larger ones that keep a part.
    "every_other_tile": lambda i, j, delta, keys: (j // 48 % 2 == 1) & (i >= 0),
    # Every other block of 64 rows keeps nothing.
    "some_rows": lambda i, j, delta, keys: (i // 64 % 2 == 0) & (j > keys // 3),
}


def shaped(case: Case, shape: str):
    """Builds the case with a mask of this shape."""
    inputs = build(dataclasses.replace(case, mask=MaskKind.CUSTOM), device="cuda")
    inputs.masks = []
    for rows, keys in zip(case.qo_lens, case.kv_lens, strict=True):
        i = torch.arange(rows, device="cuda")[:, None]
        j = torch.arange(keys, device="cuda")[None, :]
        inputs.masks.append(SHAPES[shape](i, j, keys - rows, keys))
    inputs.custom_mask = torch.cat([mask.flatten() for mask in inputs.masks])
    return inputs


def planned(case: Case, shape: str, backend: str):
    """Plans without copies, so that kernels convert operands on load."""
    inputs = shaped(case, shape)
    with prepass_policy.forced("never"):
        return runner.planned(inputs, backend=backend), inputs


def direct_cases() -> Iterator[Case]:
    for dims, page_size in itertools.product(DIMS, (0, 1, 16, 48)):
        yield Case("shape", *LENS, 6, 2, *dims, page_size=page_size)
    # 300 heads of one group are more than a tile has rows.
    for head_dim, heads in itertools.product((128, 512), ((5, 5), (14, 2), (300, 1))):
        yield Case("group", (40, 3), (333, 150), *heads, head_dim)
    for head_dim, window_left in itertools.product((128, 512), (0, 100)):
        yield Case("window", *LENS, 6, 2, head_dim, window_left=window_left, page_size=16)
    # Chunks of which a mask leaves nothing.
    for head_dim, page_size in itertools.product((128, 512), (0, 5)):
        yield Case("split", *LENS, 6, 2, head_dim, page_size=page_size, fixed_split_size=256)
    # Above 256 columns K and V arrive in slices of 128, of K as many as the head has.
    sliced = ((264, 320), (512, 64), (64, 512), (384, 256))
    for dims, page_size in itertools.product(sliced, (0, 1, 16)):
        yield Case("slices", *LENS, 4, 1, *dims, page_size=page_size)
    positions = (Position.NONE, Position.ALIBI)
    for soft_cap, position, dims in itertools.product((None, 20.0), positions, DIMS):
        how = {"soft_cap": soft_cap, "position": position, "sinks": Sinks.MIXED, "page_size": 16}
        yield Case("logits", *LENS, 6, 2, *dims, **how)


def drawn(count: int, seed: int, **axes) -> Iterator[tuple]:
    """Draws from all combinations of shapes, operands and `axes`: thousands together."""
    every = itertools.product(SHAPES, CONVERTED.values(), *axes.values())
    for shape, load, *values in random.Random(seed).sample(list(every), count):
        yield shape, load, dict(zip(axes, values, strict=True))


def converted_cases() -> Iterator[tuple[str, Case]]:
    for shape, load, how in drawn(150, 1, page_size=[0, 1, 16], dims=DIMS):
        yield shape, Case("shape", *LENS, 6, 2, *how["dims"], page_size=how["page_size"], **load)
    # Chunks of which a mask leaves nothing; (80, 48) is padded.
    split = {"page_size": 5, "fixed_split_size": 256}
    for shape, load, how in drawn(60, 2, dims=[(80, 48), (128, 128), (256, 256), (512, 512)]):
        yield shape, Case("split", *LENS, 6, 2, *how["dims"], **split, **load)
    # Decode, and drafts: short tiles know no mask.
    lens = (1, 1, 4, 1, 0, 7), (1700, 1, 513, 40, 90, 3001)
    for shape, load, how in drawn(60, 3, dims=DIMS):
        yield shape, Case("few", *lens, 8, 1, *how["dims"], page_size=16, **load)
    for shape, load, how in drawn(40, 4, window_left=[0, 100]):
        yield shape, Case("window", *LENS, 6, 2, 128, page_size=16, **how, **load)
    for shape, load, how in drawn(80, 5, head_dim=[64, 128, 256, 512], soft_cap=[None, 20.0]):
        narrow = "kv_dtype" in load or load.get("dtype") is E4M3
        how |= {"position": Position.ALIBI, "sinks": Sinks.MIXED, "head_scales": narrow, **load}
        yield shape, Case("logits", *LENS, 6, 2, how.pop("head_dim"), **how)


SHAPED = [*itertools.product(SHAPES, direct_cases()), *converted_cases()]


@pytest.mark.parametrize(
    ("backend", "shape", "case"),
    [
        pytest.param(backend, shape, case, id=f"{backend}-{shape}-{case.id}")
        for shape, case in SHAPED
        for backend in GPU_BACKENDS
    ],
)
def test_shapes(backend, shape, case):
    check_run(*planned(case, shape, backend))


@on_every_backend
@on_every_load
def test_twenty_runs_are_equal(backend, load):
    case = Case("repeat", *LENS, 8, 2, 128, page_size=16, **load)
    assert_twenty_runs_are_equal(*planned(case, "ladder", backend))


@on_every_backend
@on_every_load
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("shape", "page_size"), [("sparse", 0), ("sparse", 1), ("every_other_tile", 16)]
)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_more_tiles_than_slots(backend, dims, shape, page_size, load):
    """Each CTA's pipelines of items and tiles go round, in items of one tile, too."""
    lens = (3, 1, 2, 1, 5, 4), (300, 1, 150, 37, 1260, 97)
    case = Case("items", *lens, 64, 64, *dims, page_size=page_size, **load)
    check_run(*planned(case, shape, backend))


@on_every_backend
@pytest.mark.parametrize("shape", SHAPES)
def test_single(backend, shape):
    inputs = shaped(Case("single", (333,), (1111,), 6, 2, 128), shape)
    runner.compare(inputs, *runner.single(inputs, backend=backend)).check()


# --- where masks come from and when ----------------------------------------------


@on_every_backend
def test_plan_on_one_stream_and_run_on_another(backend):
    """plan()'s analysis of the mask is complete when a run on another stream begins."""
    case = Case("streams", *LENS, 6, 2, 128, page_size=16, mask=MaskKind.CUSTOM)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    for shape in ("blocks", "stripes", "causal", "nothing", "everything"):
        inputs = shaped(case, shape)
        torch.cuda.synchronize()
        running = torch.cuda.Stream()
        with torch.cuda.stream(torch.cuda.Stream()):
            sleep(10)
            runner.plan(wrapper, inputs)
        with torch.cuda.stream(running):
            result = runner.run(wrapper, inputs)
        running.synchronize()
        runner.compare(inputs, *result).check()


@on_every_backend
def test_later_options_have_the_same_mask(backend):
    """Another variant of the plan, first asked for by a run."""
    case = Case("later", *LENS, 6, 2, 128, page_size=16)
    wrapper, inputs = planned(case, "blocks", backend)
    inputs.case = dataclasses.replace(inputs.case, window_left=50)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        result = runner.run(wrapper, inputs, window_left=50)
    torch.cuda.synchronize()
    runner.compare(inputs, *result).check()


@on_every_backend
@on_every_load
def test_masks_of_a_graph(backend, load):
    """Between replays the mask changes by a plan, and by the caller in its buffer."""
    case = Case("graph", (70, 1, 0, 40), (300, 77, 9, 700), 6, 2, 128, page_size=16, **load)
    inputs = shaped(case, "everything")
    buffers = wrapper_options.graph_options(inputs)
    wrapper = runner.make_wrapper(inputs.case, backend=backend, device="cuda", **buffers)
    runner.plan(wrapper, inputs)
    runner.run(wrapper, inputs)
    graph, result = captured(lambda: runner.run(wrapper, inputs))
    for shape in SHAPES:
        changed = shaped(case, shape)
        inputs.masks, inputs.custom_mask = changed.masks, changed.custom_mask
        runner.plan(wrapper, inputs)
        graph.replay()
        runner.compare(inputs, *result).check()
    for shape in SHAPES:
        inputs.masks = shaped(case, shape).masks
        bits = [preflash.packbits(mask.flatten(), bitorder="little") for mask in inputs.masks]
        bits = torch.cat(bits)
        buffers["custom_mask_buf"][: bits.numel()].copy_(bits)
        graph.replay()
        runner.compare(inputs, *result).check()
