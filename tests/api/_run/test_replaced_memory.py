"""Callers may change the memory of a plan before run(): shrink workspaces, free buffers of CUDA
graphs, overwrite page indices, or share one int workspace between wrappers."""

import dataclasses
import functools
import gc
import itertools
import os

import preflash
import pytest
import torch
import wrapper_options
from fuzz.pod_trial import plan_decode
from graph_stage import Limits, Stage, capture
from planned_cases import check_run, tensors
from preflash.testing import Case, MaskKind, build, runner
from refusals import all_refused, refused

PAGED = Case("paged", (9, 3), (700, 90), 4, 2, 64, page_size=16, fixed_split_size=64)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
# One request of one head: its keys are split on more than one processor.
ROW = Case("row", (1,), (3000,), 1, 1, 64, page_size=16)
PREFILL = Case("prefill", (5,), (40,), 1, 1, 64)


def resize_storage(tensor, size: int) -> None:
    tensor.untyped_storage().resize_(size)


# Bytes that a workspace has afterwards, and a change of a tensor, which may use other memory.
SHRINKS = {
    "data": (16, lambda t, other: setattr(t, "data", other[64:80])),
    "set": (16, lambda t, other: t.set_(other[:16])),
    "cut short": (2, lambda t, _: setattr(t, "data", t[:2])),
    "shrunk": (100, lambda t, _: resize_storage(t, t.storage_offset() * t.itemsize + 100)),
    "freed": (0, lambda t, _: resize_storage(t, 0)),
}
CHANGES = {**SHRINKS, "moved": (None, lambda t, _: setattr(t, "data", torch.zeros_like(t)))}
each_shrink = pytest.mark.parametrize("change", SHRINKS.values(), ids=SHRINKS)
each_replacement = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
on_the_cpu = pytest.mark.parametrize("target", ["cpu"], indirect=True)


def replace(tensor, change) -> tuple[int | None, torch.Tensor]:
    """Changes a tensor; returns its bytes, and memory full of 7 that nothing may write."""
    there, call = change
    other = torch.full((1 << 20,), 7, dtype=tensor.dtype, device=tensor.device)
    call(tensor, other)
    return there, other


def with_workspace(kind: str, target, workspace):
    """Returns plan() of a wrapper, and its runs, which are compared with the oracle."""
    if kind == "pod":
        return pod(target, preflash.PODWithPagedKVCacheWrapper(workspace, backend=target.backend))
    inputs = build(RAGGED if kind == "ragged" else PAGED, device=target.device)
    options = wrapper_options.graph_options(inputs) if kind == "graphs" else {}
    wrapper = runner.make_wrapper(inputs.case, buffer=workspace, backend=target.backend, **options)
    return functools.partial(runner.plan, wrapper, inputs), runs_of(wrapper, inputs)


def runs_of(wrapper, inputs):
    """Returns two runs. Without an LSE, C++ alone checks the tensors from the second run on."""

    def without_lse():
        runner.compare(inputs, wrapper.run(*tensors(inputs)), None).check()

    return [lambda: check_run(inputs, wrapper), without_lse]


def pod(target, wrapper):
    p, d = (build(case, device=target.device) for case in (PREFILL, ROW))

    def run():
        results = wrapper.run_return_lse(p.q, p.k[:40], p.v[:40], d.q, d.cache)
        for inputs, result in zip((p, d), results, strict=True):
            runner.compare(inputs, *result).check()

    return functools.partial(plan_decode, wrapper, d), [run]


def call_all(calls) -> None:
    for call in calls:
        call()


@each_shrink
@pytest.mark.parametrize("kind", ["paged", "ragged", "graphs", "pod"])
def test_a_float_workspace_that_shrank(target, kind, change):
    """Before the first run, and after runs whose launches are remembered."""
    workspace = runner.workspace(target.device, 5 << 20)[1 << 20 :]
    if kind == "pod" and target.device == "cpu" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one processor: no keys are split")
    plan, runs = with_workspace(kind, target, workspace)
    plan()
    for runs_before in (int(kind == "pod"), 2):  # its run() plans, in the workspace as it is then
        call_all(runs * runs_before)
        there, other = replace(workspace, change)
        all_refused(rf"^float_workspace_buffer has {there} bytes; .* \d", runs)
        assert bool((other == 7).all())
        # Equal memory at another address is as good.
        workspace.data = torch.zeros(4 << 20, dtype=torch.uint8, device=target.device)
        call_all(runs)
    replace(workspace, change)
    if kind == "pod":  # without a fixed split, plan() uses what the workspace has
        call_all((plan, *runs))


def test_a_float_workspace_with_gaps(target):
    workspace = runner.workspace(target.device, 4 << 20)
    plan, runs = with_workspace("paged", target, workspace)
    plan()
    memory = torch.full((8 << 20,), 7, dtype=torch.uint8, device=target.device)
    workspace.data = memory[::2]
    all_refused(r"float_workspace_buffer .* contiguous", (*runs, plan))
    assert bool((memory == 7).all())
    workspace.data = memory.as_strided((8 << 20, 1), (1, 9))  # rows of one byte have no gap
    call_all((plan, *runs))


def with_int_workspace(target, inputs, int_workspace, buffer=None):
    """Returns a planned wrapper; buffer: its float workspace, by default a new one."""
    buffer = runner.workspace(target.device, 64 << 20) if buffer is None else buffer
    made = runner.make_wrapper(inputs.case, backend=target.backend, buffer=buffer)
    made.reset_workspace_buffer(buffer, int_workspace)
    runner.plan(made, inputs)
    return made


@each_replacement
def test_an_int_workspace_that_was_replaced(target, change):
    inputs = build(PAGED, device=target.device)
    int_workspace = runner.workspace(target.device, 1 << 20)
    wrapper = with_int_workspace(target, inputs, int_workspace)
    needed = wrapper._plan_info.int_bytes
    runs = runs_of(wrapper, inputs)
    for runs_before in (0, 2):
        call_all(runs * runs_before)
        there, _ = replace(int_workspace, change)
        why = f"has {there} bytes and needs {needed}"
        why = {None: "is at another address", 0: f"has no memory .* needs {needed}"}.get(there, why)
        all_refused(f"int_workspace_buffer {why}", runs)
        if there is not None:
            why = f"int_workspace_buffer has {there} bytes; .* needs"
            refused(why, runner.plan, wrapper, inputs)
            int_workspace.data = runner.workspace(target.device, 1 << 20)
        runner.plan(wrapper, inputs)
        check_run(inputs, wrapper)
        before, int_workspace = int_workspace, runner.workspace(target.device, 1 << 20)
        wrapper.reset_workspace_buffer(wrapper._float_workspace_buffer, int_workspace)
        before.zero_()  # the new one has the work list
        check_run(inputs, wrapper)


LIKE = Case("graphs", (), (), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
BATCH = ((30, 5, 0), (100, 90, 7))
READ_BY_KERNELS = ("paged_kv_indices_buf", "custom_mask_buf")
PAGE_BUFFERS = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
BUFFERS = ("qo_indptr_buf", "kv_indptr_buf", *PAGE_BUFFERS, "custom_mask_buf", "mask_indptr_buf")


def staged(target, like=LIKE, **options):
    limits = Limits(batch=3, rows=40, pages=90 if like.paged else 0, tokens=600)
    stage = Stage(like, limits, target, masked=like.mask is MaskKind.CUSTOM, **options)
    inputs = stage.make(*BATCH)
    stage.plan(inputs)
    return stage, inputs


def staged_runs(stage):
    return (stage.run, lambda: stage.wrapper.run(stage.q, *stage.cache(), out=stage.out))


@each_replacement
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_that_were_replaced(target, name, change):
    """plan() refuses each buffer, and run() those that kernels read."""
    ragged = dataclasses.replace(LIKE, page_size=0, mask=MaskKind.NONE)
    for runs_before in (0, 2):
        stage, inputs = staged(target, ragged if name == "kv_indptr_buf" else LIKE)
        runs = staged_runs(stage)
        for run in runs * runs_before:
            run()
            stage.check(inputs)
        _, other = replace(stage.buffers[name], change)
        stage.load(inputs)
        all_refused(name, runs * (name in READ_BY_KERNELS))
        for given in (inputs, stage.make(*BATCH, seed=1, on_host=False)):
            refused(f"{name} .* since the constructor", stage.plan, given)
        assert bool(stage.out.isnan().all())
        assert bool((other == 7).all())


@pytest.mark.parametrize("name", READ_BY_KERNELS)
def test_other_options_refuse_buffers_that_were_freed_before(target, name):
    """Plans made by forward() would find only the offset as a freed buffer's address."""
    stage, inputs = staged(target)
    whole = torch.zeros(4096, dtype=stage.buffers[name].dtype, device=target.device)
    buffers = {**stage.buffers, name: whole[64 : 64 + stage.buffers[name].numel()]}
    on = {"backend": target.backend, "device": target.device}
    wrapper = runner.make_wrapper(LIKE, use_cuda_graph=True, **on, **buffers)
    runner.plan(wrapper, inputs)
    given = (stage.q, *stage.cache())
    wrapper.run(*given)
    resize_storage(whole, 0)
    refused(name, wrapper.forward, *given, logits_soft_cap=30.0)
    refused(name, wrapper.run, *given, window_left=20)


def graph_pod(target):
    sizes = zip(PAGE_BUFFERS, (2, 188, 1), strict=True)
    buffers = {n: torch.zeros(k, dtype=torch.int32, device=target.device) for n, k in sizes}
    named = {f"{name}fer": buffer for name, buffer in buffers.items()}
    make, workspace = preflash.PODWithPagedKVCacheWrapper, runner.workspace(target.device)
    plan, runs = pod(target, make(workspace, "NHD", True, backend=target.backend, **named))
    call_all((plan, *runs))
    return buffers, plan, runs


@pytest.mark.parametrize("name", PAGE_BUFFERS)
def test_pod_refuses_buffers_that_were_freed(target, name):
    buffers, plan, runs = graph_pod(target)
    resize_storage(buffers[name], 0)
    all_refused(f"{name} has no memory", (plan, *runs * (name in READ_BY_KERNELS)))


@each_replacement
def test_plan_refuses_workspaces_that_a_graph_has_lost(target, recorder, change):
    like = dataclasses.replace(LIKE, mask=MaskKind.CAUSAL, fixed_split_size=64)
    workspace = runner.workspace(target.device, 64 << 20)
    stage, inputs = staged(target, like, workspace=workspace)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    stage.plan(inputs)
    graph.replay()
    stage.check(inputs)
    replace(workspace, change)
    refused("float_workspace_buffer", stage.plan, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["fa2", "fa3"], indirect=True)
def test_page_indices_on_the_device_that_were_freed(target):
    """Page indices on the device are used in place, not copied by plan()."""
    inputs = build(PAGED, device=target.device)
    wrapper = runner.planned(inputs, backend=target.backend)
    runner.run(wrapper, inputs)
    resize_storage(inputs.indices, 0)
    refused("paged_kv_indices has no memory", runner.run, wrapper, inputs)


def runs_and_indices(kind: str, target):
    """Returns runs, the buffer of their page indices, and how many are in use."""
    if kind == "pod":
        buffers, _, runs = graph_pod(target)
        return runs, buffers["paged_kv_indices_buf"], 188
    stage, inputs = staged(target)

    def run(**options):
        stage.load(inputs)
        try:
            stage.run(**options)
        except ValueError:
            assert bool(stage.out.isnan().all())
            raise
        runner.compare(inputs, stage.out[: len(inputs.q)], None).check()

    runs = [run, functools.partial(run, lse=None, return_lse=False)]
    return runs, stage.buffers["paged_kv_indices_buf"], int(inputs.kv_indptr[-1])


@on_the_cpu
@pytest.mark.parametrize(("kind", "pool"), [("prefill", 90), ("pod", build(ROW).k.shape[0])])
def test_page_indices_that_were_overwritten(target, kind, pool):
    """Indices are checked in the first run and in later ones; those after the last page are not."""
    runs, indices, used = runs_and_indices(kind, target)
    for page, at in itertools.product((2**30, pool, -1, -(2**31)), (0, used - 1)):
        right = int(indices[at])
        indices[at] = page
        all_refused(f"paged_kv_indices holds {page};", runs)
        indices[at] = right
        indices[used:] = page
        call_all(runs)


def inputs_of(target, seed, **changes):
    return build(dataclasses.replace(PAGED, **changes), device=target.device, seed=seed)


def refuses_runs(inputs, wrapper) -> None:
    all_refused("holds the work list of another wrapper", runs_of(wrapper, inputs))


def test_a_work_list_of_another_wrapper(target):
    """Engines pass one wrapper's int workspace to another."""
    a, b = inputs_of(target, 0), inputs_of(target, 1, qo_lens=(40, 1), kv_lens=(33, 1500))
    owner = runner.planned(a, backend=target.backend)
    call_all(runs_of(owner, a))
    second = with_int_workspace(target, b, owner._int_workspace_buffer)
    refuses_runs(a, owner)
    runner.plan(owner, a)  # into memory of its own again
    check_run(a, owner)
    check_run(b, second)


@pytest.mark.parametrize("shift", [0, 16, 256, 1 << 19])
def test_int_workspaces_that_overlap(target, shift):
    """One float workspace stays allowed. Engines that share both plan before each run()."""
    memory, floats = (runner.workspace(target.device, n << 20) for n in (2, 64))
    a, b = inputs_of(target, 0), inputs_of(target, 1)
    for order in (1, -1):
        parts = (memory[: 1 << 20], memory[shift : shift + (1 << 20)])[::order]
        first = with_int_workspace(target, a, parts[0], floats)
        call_all(runs_of(first, a))
        second = with_int_workspace(target, b, parts[1], floats)
        check_other = refuses_runs if shift < first._plan_info.int_bytes else check_run
        for _ in range(2):
            check_other(a, first)
            check_run(b, second)
            runner.plan(first, a)
            check_run(a, first)
            check_other(b, second)
            runner.plan(second, b)


def test_a_wrapper_that_is_gone_has_no_claim(target):
    kept = []
    for seed in range(4):
        inputs = inputs_of(target, seed)
        for _ in range(3):
            wrapper = None
            gc.collect()
            memory = runner.workspace(target.device, 1 << 18)  # perhaps that of the last wrapper
            wrapper = with_int_workspace(target, inputs, memory)
        kept.append((inputs, wrapper))
    for inputs, wrapper in kept:
        check_run(inputs, wrapper)


def test_a_smaller_plan_leaves_the_memory_after_it(target):
    """The int workspace holds the latest plan; another wrapper may use the memory after it."""
    memory = runner.workspace(target.device, 4 << 20)
    large = inputs_of(target, 0, qo_lens=(300, 200), kv_lens=(4000, 4000))
    small = inputs_of(target, 1)
    for alignment in (1, 64):
        first = with_int_workspace(target, large, memory)
        size = first._plan_info.int_bytes
        runner.plan(first, small)
        begin = -(-first._plan_info.int_bytes // alignment) * alignment
        assert begin < size
        second = with_int_workspace(target, small, memory[begin:])
        for wrapper in (first, second):
            check_run(small, wrapper)


def test_captured_runs_and_plans_of_graphs(target, recorder):
    """Planning into the captured place again keeps it the wrapper's own."""
    shared, graphs = runner.workspace(target.device, 1 << 20), []
    stages = [staged(target)[0] for _ in range(2)]
    for stage in stages:
        stage.wrapper.reset_workspace_buffer(runner.workspace(target.device), shared)
    for stage in stages:
        stage.plan(stage.make(*BATCH))
        stage.run()
        graphs.append(capture(recorder, target.device, stage.run))
    for seed in range(3):
        for stage, graph in zip(stages, graphs, strict=True):
            inputs = stage.make(*BATCH, seed=seed)
            stage.plan(inputs)
            graph.replay()
            stage.check(inputs)
        refused("holds the work list of another wrapper", stages[0].run)
