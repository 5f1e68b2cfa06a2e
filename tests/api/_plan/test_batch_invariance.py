"""With batch_invariant=True the bits of a request's rows depend on the request alone."""

import dataclasses
import os
import subprocess
import sys

import preflash
import pytest
import torch
from fuzz.altered_inputs import lone, part
from fuzz.pod_trial import plan_decode
from planned_cases import bounds_of, tensors
from preflash.testing import Case, MaskKind, build, runner
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


def table_of(inputs) -> tuple:
    return (inputs.kv_indptr, inputs.indices, inputs.last_page_len)


def test_the_rest_of_the_batch_and_chunks(target, batch):
    inputs, wanted = batch
    for i, rows in enumerate(wanted):
        assert torch.equal(computed(lone(inputs, i), target), rows)
    for begin, end in ((0, 1), (1, 37), (0, 20), (20, 36), (36, 37)):
        got = computed(part(inputs, 0, begin, end), target)
        assert torch.equal(got, wanted[0][begin:end]), (begin, end)


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
            runner.planned(given, backend=target.backend, size=size) for size in (64 << 20, 700_000)
        )
        assert whole._plan_info.num_rounds == 1
        assert small._plan_info.num_rounds > 2
        got = [wrapper.run(*tensors(given), return_lse=True) for wrapper in (whole, small)]
        assert all(map(torch.equal, *got)), changes


def test_decode(target, batch):
    inputs, wanted = batch
    make = preflash.BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(runner.workspace(target.device), backend=target.backend)
    plan_decode(wrapper, inputs.case, table_of(inputs), batch_invariant=True)
    last_rows = torch.stack([q[-1] for q in inputs.q.split(QO_LENS)])
    got = wrapper.run(last_rows, inputs.cache)
    assert torch.equal(got, torch.stack([rows[-1] for rows in wanted]))


def test_single_requests(target, batch):
    inputs, wanted = batch
    ragged = stored(inputs, page_size=0)
    for i, rows in enumerate(wanted):
        one = lone(ragged, i)
        out, _ = runner.single(one, backend=target.backend)
        assert torch.equal(out, rows)
        got = preflash.single_decode_with_kv_cache(one.q[-1], one.k, one.v, batch_invariant=True)
        if target.backend != "fa2":  # this function takes no backend
            assert torch.equal(got, rows[-1])


def test_prefill_beside_decode(target, batch):
    """Request 1 is prefilled beside a decode step of request 2."""
    inputs, wanted = batch
    make = preflash.PODWithPagedKVCacheWrapper
    wrapper = make(runner.workspace(target.device), backend=target.backend)
    step, whole = lone(inputs, 2), lone(stored(inputs, page_size=0), 1)
    plan_decode(wrapper, step.case, table_of(step), batch_invariant=True)
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


CODE = """
import torch, preflash
wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
    torch.empty(1 << 20, dtype=torch.uint8), backend="cpu")
indptrs = (torch.tensor([0, n], dtype=torch.int32) for n in (1, 30000))
print(wrapper.workspace_size(*indptrs, 1, 1, 8)[0] > 0)
"""


@pytest.mark.parametrize(("value", "is_cut"), [("1", "False"), ("0", "True")])
def test_the_environment_sets_it_for_every_call(value, is_cut):
    """A plan that cuts no keys needs no workspace."""
    environment = {**os.environ, "PREFLASH_BATCH_INVARIANT": value}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == is_cut, done.stderr
