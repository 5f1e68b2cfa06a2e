"""Custom masks with a structure: tiles that keep all, nothing or something, rows without a key, and
rows whose keys come late."""

import dataclasses
import itertools
import random

import preflash
import prepass_policy
import pytest
import torch
from backends import on_every_backend
from preflash.testing import Case, MaskKind, Position, Sinks, build, runner
from repetition import assert_twenty_runs_are_equal

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)]
LENS = (300, 70, 1, 0, 9), (700, 1211, 513, 40, 0)


def causal(i, j, delta, num_keys):
    return j <= i + delta


def blocks(i, j, delta, num_keys):
    """Packed sequences that do not see each other."""
    return (i + delta) // 96 == j // 96


def tree(i, j, delta, num_keys):
    """Drafts behind a prompt: each sees the prompt and its ancestors."""
    return (j < delta) | ((j <= i + delta) & ((i + delta - j) % 7 == 0))


def stripes(i, j, delta, num_keys):
    """Rows without a key beside others, and tiles without a key between others."""
    return (i % 3 != 1) & (j // 200 % 2 == 1)


def first_keys(i, j, delta, num_keys):
    """The tiles that a loop from the last key meets first keep nothing."""
    return (j < 3) & (i >= 0)


def ladder(i, j, delta, num_keys):
    """Each row sees a part of the keys: rows get their first one at different times."""
    return j * 7 // max(num_keys, 1) == i % 7


def nothing(i, j, delta, num_keys):
    return (j < 0) & (i < 0)


def everything(i, j, delta, num_keys):
    return (j >= 0) & (i >= 0)


def sparse(i, j, delta, num_keys):
    return (i * 40503 + j * 30011) % 977 == 0


def every_other_tile(i, j, delta, num_keys):
    """Tiles of 48 keys that keep all or nothing, and larger ones that keep a part."""
    return (j // 48 % 2 == 1) & (i >= 0)


def some_rows(i, j, delta, num_keys):
    """Every other block of 64 rows keeps nothing."""
    return (i // 64 % 2 == 0) & (j > num_keys // 3)


SHAPES = [causal, blocks, tree, stripes, first_keys, ladder, nothing, everything, sparse,
          every_other_tile, some_rows]  # fmt: skip

on_every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)


def shaped(case: Case, shape):
    """The case's inputs with such a mask."""
    inputs = build(case, device="cuda")
    masks = []
    for rows, keys in zip(case.qo_lens, case.kv_lens, strict=True):
        i = torch.arange(rows, device="cuda")[:, None]
        j = torch.arange(keys, device="cuda")[None, :]
        masks.append(shape(i, j, keys - rows, keys))
    inputs.masks = masks
    inputs.custom_mask = torch.cat([mask.flatten() for mask in masks])
    return inputs


@on_every_backend
@on_every_shape
@pytest.mark.parametrize("page_size", [0, 1, 16, 48])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_shapes(backend, dims, page_size, shape):
    case = Case("shape", *LENS, 6, 2, *dims, page_size=page_size, mask=MaskKind.CUSTOM)
    runner.check(shaped(case, shape), backend=backend)


@on_every_backend
@on_every_shape
@pytest.mark.parametrize("heads", [(5, 5), (14, 2), (300, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [128, 512])
def test_groups(backend, head_dim, heads, shape):
    """300 heads of one group are more than a tile has rows."""
    case = Case("group", (40, 3), (333, 150), *heads, head_dim, mask=MaskKind.CUSTOM)
    runner.check(shaped(case, shape), backend=backend)


@on_every_backend
@on_every_shape
@pytest.mark.parametrize("window_left", [0, 100])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_windows(backend, head_dim, window_left, shape):
    how = {"mask": MaskKind.CUSTOM, "window_left": window_left, "page_size": 16}
    runner.check(shaped(Case("window", *LENS, 6, 2, head_dim, **how), shape), backend=backend)


@on_every_backend
@on_every_shape
@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_split_keys(backend, head_dim, page_size, shape):
    """Chunks of which a mask leaves nothing."""
    how = {"mask": MaskKind.CUSTOM, "page_size": page_size, "fixed_split_size": 256}
    runner.check(shaped(Case("split", *LENS, 6, 2, head_dim, **how), shape), backend=backend)


@on_every_backend
@on_every_shape
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dims", [(264, 320), (512, 64), (64, 512), (384, 256)], ids=str)
def test_slices_that_lie_past_the_head(backend, dims, page_size, shape):
    """Above 256 columns K and V arrive in slices of 128, of K as many as the head has."""
    case = Case("slices", *LENS, 4, 1, *dims, page_size=page_size, mask=MaskKind.CUSTOM)
    runner.check(shaped(case, shape), backend=backend)


@on_every_backend
@on_every_shape
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("position", [Position.NONE, Position.ALIBI], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_logits(backend, soft_cap, position, dims, shape):
    how = {"soft_cap": soft_cap, "position": position, "sinks": Sinks.MIXED, "page_size": 16}
    case = Case("logits", *LENS, 6, 2, *dims, mask=MaskKind.CUSTOM, **how)
    runner.check(shaped(case, shape), backend=backend)


@on_every_backend
def test_twenty_runs_are_equal(backend):
    case = Case("repeat", *LENS, 8, 2, 128, page_size=16, mask=MaskKind.CUSTOM)
    inputs = shaped(case, ladder)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    runner.plan(wrapper, inputs)
    assert_twenty_runs_are_equal(wrapper, inputs)


@on_every_backend
@pytest.mark.sanitizer
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_more_tiles_than_slots(backend, dims, page_size):
    """Each CTA's pipelines of items and tiles go round."""
    lens = (3, 1, 2, 1, 5, 4), (300, 1, 150, 37, 1260, 97)
    case = Case("items", *lens, 64, 64, *dims, page_size=page_size, mask=MaskKind.CUSTOM)
    runner.check(shaped(case, sparse), backend=backend)


# --- operands that are converted on load -----------------------------------------

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LOADS = {
    "rope": {"position": Position.ROPE},
    "e4m3": {"kv_dtype": E4M3},
    "e5m2": {"kv_dtype": E5M2, "dtype": torch.float16},
    "rope_e4m3": {"position": Position.ROPE, "kv_dtype": E4M3},
    "e4m3_queries": {"dtype": E4M3},
}

on_every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def drawn(count: int, seed: int, **axes):
    """`count` of all combinations of shapes, loads and `axes`: thousands together."""
    axes = {"shape": SHAPES, "load": list(LOADS), **axes}
    every = list(itertools.product(*axes.values()))
    return pytest.mark.parametrize(tuple(axes), random.Random(seed).sample(every, count), ids=named)


def named(value: object) -> str:
    return getattr(value, "__name__", str(value))


def check_without_copies(case: Case, shape, backend: str) -> None:
    inputs = shaped(case, shape)
    with prepass_policy.forced("never"):
        runner.check(inputs, backend=backend)


@on_every_backend
@drawn(150, 1, page_size=[0, 1, 16], dims=DIMS)
def test_shapes_over_converted_operands(backend, dims, page_size, load, shape):
    how = {"page_size": page_size, "mask": MaskKind.CUSTOM, **LOADS[load]}
    check_without_copies(Case("shape", *LENS, 6, 2, *dims, **how), shape, backend)


@on_every_backend
@drawn(60, 2, dims=[(80, 48), (128, 128), (256, 256), (512, 512)])
def test_split_keys_over_converted_operands(backend, dims, load, shape):
    """Chunks of which a mask leaves nothing; (80, 48) is padded."""
    how = {"mask": MaskKind.CUSTOM, "page_size": 5, "fixed_split_size": 256, **LOADS[load]}
    check_without_copies(Case("split", *LENS, 6, 2, *dims, **how), shape, backend)


@on_every_backend
@drawn(60, 3, dims=DIMS)
def test_few_rows_over_converted_operands(backend, dims, load, shape):
    """Decode, and drafts: short tiles know no mask."""
    lens = (1, 1, 4, 1, 0, 7), (1700, 1, 513, 40, 90, 3001)
    how = {"mask": MaskKind.CUSTOM, "page_size": 16, **LOADS[load]}
    check_without_copies(Case("few", *lens, 8, 1, *dims, **how), shape, backend)


@on_every_backend
@drawn(40, 4, window_left=[0, 100])
def test_windows_over_converted_operands(backend, window_left, load, shape):
    how = {
        "mask": MaskKind.CUSTOM,
        "window_left": window_left,
        "page_size": 16,
        **LOADS[load],
    }
    check_without_copies(Case("window", *LENS, 6, 2, 128, **how), shape, backend)


@on_every_backend
@drawn(80, 5, head_dim=[64, 128, 256, 512], soft_cap=[None, 20.0])
def test_logits_over_converted_operands(backend, soft_cap, head_dim, load, shape):
    what = LOADS[load]
    how = {"soft_cap": soft_cap, "sinks": Sinks.MIXED, "mask": MaskKind.CUSTOM, **what}
    narrow = "kv_dtype" in what or what.get("dtype") is E4M3
    if "position" not in what:
        how["position"] = Position.ALIBI
    case = Case("logits", *LENS, 6, 2, head_dim, head_scales=narrow, **how)
    check_without_copies(case, shape, backend)


@on_every_backend
@on_every_load
@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", [sparse, every_other_tile], ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_more_tiles_than_slots_over_converted_operands(backend, dims, shape, load):
    """Each CTA's pipelines of items and tiles go round, in items of one tile, too."""
    lens = (3, 1, 2, 1, 5, 4), (300, 1, 150, 37, 1260, 97)
    how = {"mask": MaskKind.CUSTOM, "page_size": 1, **load}
    check_without_copies(Case("items", *lens, 64, 64, *dims, **how), shape, backend)


@on_every_backend
@on_every_load
def test_twenty_runs_over_converted_operands_are_equal(backend, load):
    case = Case("repeat", *LENS, 8, 2, 128, page_size=16, mask=MaskKind.CUSTOM, **load)
    inputs = shaped(case, ladder)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    with prepass_policy.forced("never"):
        runner.plan(wrapper, inputs)
    assert_twenty_runs_are_equal(wrapper, inputs)


@on_every_backend
@on_every_load
def test_masks_need_no_room_for_copies(backend, load):
    """A prefill that copies would make faster, with a workspace that does not hold them."""
    how = {"mask": MaskKind.CUSTOM, "page_size": 16, **load}
    inputs = shaped(Case("room", (3000,), (6133,), 8, 8, 128, **how), causal)
    buffer = runner.workspace("cuda", 8 << 20)
    wrapper = runner.make_wrapper(inputs.case, backend=backend, device="cuda", buffer=buffer)
    runner.plan(wrapper, inputs)
    assert not wrapper._plan.primary.plan.has_prepass
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


# --- where masks come from and when ----------------------------------------------


def bits_of(inputs) -> torch.Tensor:
    packed = [preflash.packbits(mask.flatten(), bitorder="little") for mask in inputs.masks]
    return torch.cat(packed)


@on_every_backend
def test_plan_on_one_stream_and_run_on_another(backend):
    """plan()'s analysis of the mask is complete when a run on another stream begins."""
    case = Case("streams", *LENS, 6, 2, 128, page_size=16, mask=MaskKind.CUSTOM)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    for shape in (blocks, stripes, causal, nothing, everything):
        inputs = shaped(case, shape)
        torch.cuda.synchronize()
        planning, running = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(planning):
            torch.cuda._sleep(20_000_000)
            runner.plan(wrapper, inputs)
        with torch.cuda.stream(running):
            out, lse = runner.run(wrapper, inputs)
        running.synchronize()
        runner.compare(inputs, out, lse).check()


@on_every_backend
def test_later_options_have_the_same_mask(backend):
    """Another variant of the plan, first asked for by a run."""
    case = Case("later", *LENS, 6, 2, 128, page_size=16, mask=MaskKind.CUSTOM)
    inputs = shaped(case, blocks)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    runner.plan(wrapper, inputs)
    inputs.case = dataclasses.replace(case, window_left=50)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        out, lse = runner.run(wrapper, inputs, window_left=50)
    torch.cuda.synchronize()
    runner.compare(inputs, out, lse).check()


@on_every_backend
@on_every_shape
def test_single(backend, shape):
    case = Case("single", (333,), (1111,), 6, 2, 128, mask=MaskKind.CUSTOM)
    inputs = shaped(case, shape)
    runner.compare(inputs, *runner.single(inputs, backend=backend)).check()


@on_every_backend
@pytest.mark.parametrize("load", ["direct", *LOADS])
def test_masks_of_a_graph(backend, load):
    """Between replays the mask changes by a plan, and by the caller in its buffer."""
    batch, pages, page_size = 4, 128, 16
    case = Case("graph", (70, 1, 0, 40), (300, 77, 9, 700), 6, 2, 128, mask=MaskKind.CUSTOM)
    case = dataclasses.replace(case, page_size=page_size, **LOADS.get(load, {}))
    mask_buffer = torch.zeros(16384, dtype=torch.uint8, device="cuda")

    def ints(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device="cuda")

    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace("cuda"),
        use_cuda_graph=True,
        qo_indptr_buf=ints(batch + 1),
        paged_kv_indptr_buf=ints(batch + 1),
        paged_kv_indices_buf=ints(pages),
        paged_kv_last_page_len_buf=ints(batch),
        custom_mask_buf=mask_buffer,
        mask_indptr_buf=ints(batch + 1),
        backend=backend,
    )
    inputs = shaped(case, everything)
    runner.plan(wrapper, inputs)
    runner.run(wrapper, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = runner.run(wrapper, inputs)
    for shape in SHAPES:
        changed = shaped(case, shape)
        inputs.masks, inputs.custom_mask = changed.masks, changed.custom_mask
        runner.plan(wrapper, inputs)
        graph.replay()
        runner.compare(inputs, out, lse).check()
    for shape in SHAPES:
        inputs.masks = shaped(case, shape).masks
        bits = bits_of(inputs)
        mask_buffer[: bits.numel()].copy_(bits)
        graph.replay()
        runner.compare(inputs, out, lse).check()
