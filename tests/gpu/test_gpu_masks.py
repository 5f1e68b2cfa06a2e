"""Custom masks whose tiles keep all, nothing or something, and whose rows have late keys."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import preflash
import prepass_policy
import pytest
import torch
import wrapper_options
from backends import captured, check_run, check_runs, sleep
from converted_cases import E4M3, E5M2, ROPE
from preflash.testing import Case, MaskKind, Position, Sinks, build, runner
from preflash.testing.inputs import attach_masks, pack_little

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)]
LENS = (300, 70, 1, 0, 9), (700, 1211, 513, 40, 0)
CONVERTED = {
    "rope": ROPE,
    "e4m3": {"kv_dtype": E4M3},
    "e5m2": {"kv_dtype": E5M2, "dtype": torch.float16},
    "rope_e4m3": ROPE | {"kv_dtype": E4M3},
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
        i, j = torch.arange(rows, device="cuda"), torch.arange(keys, device="cuda")
        inputs.masks.append(SHAPES[shape](i[:, None], j[None], keys - rows, keys))
    attach_masks(inputs, inputs.masks, "cuda")
    return inputs


def planned(case: Case, shape: str, backend: str):
    """Plans without copies, so that kernels convert operands on load."""
    inputs = shaped(case, shape)
    with prepass_policy.forced("never"):
        return runner.planned(inputs, backend=backend), inputs


HALF_DIRECT = ["direct"] * len(CONVERTED) + [*CONVERTED]


def drawn(count: int, lens=LENS, heads=((6, 2),), loads=HALF_DIRECT, **axes) -> Iterator[tuple]:
    """Draws from all combinations of shapes, heads, operands and axes: thousands together."""
    every = [*itertools.product(SHAPES, heads, loads, *axes.values())]
    for shape, heads, load, *values in random.Random(count).sample(every, count):
        how = dict(zip(axes, values, strict=True))
        yield shape, Case(load, *lens, *heads, *how.pop("dims"), **how | LOADS[load])


def shaped_cases() -> Iterator[tuple[str, Case]]:
    yield from drawn(360, dims=DIMS, page_size=(0, 1, 16, 48))
    # 300 heads of one group are more than a tile has rows.
    groups, wide = [(5, 5), (14, 2), (300, 1)], [(128, 128), (512, 512)]
    yield from drawn(60, ((40, 3), (333, 150)), groups, dims=wide)
    yield from drawn(80, dims=wide, window_left=(0, 100), page_size=[16])
    # Chunks of which a mask leaves nothing; (80, 48) is padded.
    yield from drawn(110, dims=[(80, 48), *DIMS], page_size=(0, 5), fixed_split_size=[256])
    # Above 256 columns K and V arrive in slices of 128, of K as many as the head has.
    sliced = [(264, 320), (512, 64), (64, 512), (384, 256)]
    yield from drawn(70, LENS, [(4, 1)], ["direct"], dims=sliced, page_size=(0, 1, 16))
    # Decode, and drafts: short tiles know no mask.
    lens = (1, 1, 4, 1, 0, 7), (1700, 1, 513, 40, 90, 3001)
    yield from drawn(60, lens, [(8, 1)], CONVERTED, dims=DIMS, page_size=[16])
    how = {"sinks": [Sinks.MIXED], "soft_cap": (None, 20.0), "page_size": (0, 16), "dims": DIMS}
    for shape, case in drawn(200, position=(Position.NONE, Position.ALIBI), **how):
        yield shape, dataclasses.replace(case, head_scales=case.dtype_kv.itemsize == 1)


SHAPED = dict.fromkeys(shaped_cases())


@pytest.mark.parametrize(("shape", "case"), SHAPED, ids=lambda part: getattr(part, "id", part))
def test_shapes(backend, shape, case):
    check_run(*planned(case, shape, backend))


@on_every_load
def test_twenty_runs_are_equal(backend, load):
    case = Case("repeat", *LENS, 8, 2, 128, page_size=16, **load)
    check_runs(*planned(case, "ladder", backend))


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


def test_plan_on_one_stream_and_run_on_another(backend):
    """plan()'s analysis of the mask is complete for a run, and for its variants, on any stream."""
    case = Case("streams", *LENS, 6, 2, 128, page_size=16)
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
            of_window = runner.run(wrapper, inputs, window_left=50)
        running.synchronize()
        runner.compare(inputs, *result).check()
        inputs.case = dataclasses.replace(inputs.case, window_left=50)
        runner.compare(inputs, *of_window).check()


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
    for plans, shape in itertools.product((True, False), SHAPES):
        inputs.masks = shaped(case, shape).masks
        if plans:
            attach_masks(inputs, inputs.masks, "cuda")
            runner.plan(wrapper, inputs)
        else:
            bits = torch.cat([pack_little(mask) for mask in inputs.masks])
            buffers["custom_mask_buf"][: bits.numel()].copy_(bits)
        graph.replay()
        runner.compare(inputs, *result).check()


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits_equals_the_cpu(bitorder):
    """Sizes fill a GPU."""
    bits = torch.rand((1 << 25) + 3) < 0.5
    lengths = torch.randint(0, 3000, (500,))
    lengths[::7] = 0
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    packed = preflash.packbits(bits.cuda(), bitorder)
    segments = preflash.segment_packbits(bits[: ends[-1]].cuda(), ends.cuda(), bitorder)
    expected = preflash.segment_packbits(bits[: ends[-1]], ends, bitorder)
    assert torch.equal(packed.cpu(), preflash.packbits(bits, bitorder))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(segments, expected, strict=True))
