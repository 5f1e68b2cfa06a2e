"""With batch_invariant=True the bits of a request's rows depend on the request alone."""

import dataclasses
import itertools

import preflash
import pytest
import torch
from fuzz.altered_inputs import lone, part, with_bounds
from fuzz.pod_trial import plan_decode
from planned_cases import bounds_of, tensors
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.inputs import pages_of
from processes import python
from wrapper_options import graph_options

# Long enough for other plans to cut the keys; the last request is a decode step.
QO_LENS, KV_LENS = (37, 300, 1), (4500, 2100, 6200)
CASE = Case("served", QO_LENS, KV_LENS, 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL,
            batch_invariant=True)  # fmt: skip


def computed(inputs, target, *, plan=None, **options) -> torch.Tensor:
    """Returns the output of a new wrapper; options: of the constructor."""
    on = {"backend": target.backend, "device": target.device}
    wrapper = runner.make_wrapper(inputs.case, **on, **options)
    runner.plan(wrapper, inputs, **plan or {})
    return wrapper.run(*tensors(inputs))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def batch(request, target):
    """Returns the inputs, and the rows of each request computed as one batch."""
    inputs = build(dataclasses.replace(CASE, dtype=request.param), device=target.device)
    return inputs, computed(inputs, target).split(QO_LENS)


def stored(inputs, **changes):
    """Builds the same numbers in another storage."""
    return build(dataclasses.replace(inputs.case, **changes), device=inputs.q.device)


FORMS = {
    "pages of 1": {"page_size": 1},
    "pages of 64": {"page_size": 64},
    "hnd": {"layout": "HND"},
    "ragged": {"page_size": 0},
    "graph": {},
    "no workspace": {},
}


def test_storage_graphs_and_workspace(target, batch):
    inputs, wanted = batch
    for form, changes in FORMS.items():
        given = stored(inputs, **changes)
        assert torch.equal(given.q, inputs.q)
        options = graph_options(given) if form == "graph" else {}
        if form == "no workspace":
            options["buffer"] = runner.workspace(target.device, 0)
        assert torch.equal(computed(given, target, **options), torch.cat(wanted)), form


def test_a_small_workspace(target, batch):
    """A fixed split takes several launches over the same workspace: the bits are the same."""
    inputs, _ = batch
    for changes in ({}, {"page_size": 0}, {"mask": MaskKind.NONE}, {"mask": MaskKind.CUSTOM}):
        given = stored(inputs, batch_invariant=False, fixed_split_size=512, **changes)
        whole, small = (
            runner.planned(given, backend=target.backend, size=size) for size in (64 << 20, 800_000)
        )
        assert whole._plan_info.num_rounds == 1
        assert small._plan_info.num_rounds > 2
        got = [wrapper.run(*tensors(given), return_lse=True) for wrapper in (whole, small)]
        assert all(map(torch.equal, *got)), changes


def test_decode_and_single_requests(target, batch):
    inputs, wanted = batch
    make = preflash.BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(runner.workspace(target.device), backend=target.backend)
    plan_decode(wrapper, inputs, batch_invariant=True)
    last_rows = torch.stack([q[-1] for q in inputs.q.split(QO_LENS)])
    got = wrapper.run(last_rows, inputs.cache)
    assert torch.equal(got, torch.stack([rows[-1] for rows in wanted]))
    ragged = stored(inputs, page_size=0)
    for i, rows in enumerate(wanted):
        assert torch.equal(computed(lone(inputs, i), target), rows)
        one = lone(ragged, i)
        assert torch.equal(runner.single(one, backend=target.backend)[0], rows)
        got = preflash.single_decode_with_kv_cache(one.q[-1], one.k, one.v, batch_invariant=True)
        if target.backend != "fa2":  # this function takes no backend
            assert torch.equal(got, rows[-1])


def test_prefill_beside_decode(target, batch):
    """Request 1 is prefilled beside a decode step of request 2."""
    inputs, wanted = batch
    make = preflash.PODWithPagedKVCacheWrapper
    wrapper = make(runner.workspace(target.device), backend=target.backend)
    step, whole = lone(inputs, 2), lone(stored(inputs, page_size=0), 1)
    plan_decode(wrapper, step, batch_invariant=True)
    got = wrapper.run(whole.q, whole.k, whole.v, step.q, inputs.cache, causal_p=True)
    assert all(map(torch.equal, got, wanted[1:]))


def test_windows_and_upper_bounds(target, batch):
    """The bits are the same where only the device knows the lengths."""
    inputs, _ = batch
    exact, bounded = (
        computed(inputs, target, plan={"window_left": 3000, **options})
        for options in ({}, bounds_of(inputs))
    )
    assert torch.equal(exact, bounded)


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_environment_sets_it_for_every_call(value):
    """A plan that cuts no keys needs no workspace."""
    printed = python(
        """
        import preflash, torch
        workspace = torch.empty(1 << 20, dtype=torch.uint8)
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="cpu")
        indptrs = (torch.tensor([0, n], dtype=torch.int32) for n in (1, 30000))
        print(wrapper.workspace_size(*indptrs, 1, 1, 8)[0] == 0)
        """,
        PREFLASH_BATCH_INVARIANT=value,
    )
    assert printed == f"{value == '1'}\n"


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
    pages = torch.tensor(inputs.page_table[0], device=positions.device)
    return pages[positions // PAGE], positions % PAGE


def with_lse(target, inputs, *, more_pages: int = 0):
    """Returns (out, lse). more_pages: plan() knows an upper bound of so many pages more."""
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
    whole = with_lse(target, inputs)
    chunks = [*itertools.pairwise((0, *CUTS)), *((step, step + 1) for step in STEPS)]
    for begin, end in chunks:
        for more_pages in (0, 13) if kind != "window" else (0,):
            chunk = with_lse(target, part(inputs, 0, begin, end), more_pages=more_pages)
            for given, expected in zip(chunk, whole, strict=True):
                assert torch.equal(given, expected[begin:end]), (begin, end, more_pages)
