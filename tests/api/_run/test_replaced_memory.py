"""Memory that plan() counted on and that callers change before run(): workspaces that shrink,
buffers of CUDA graphs that are freed, page indices that are overwritten, one int workspace of two
wrappers."""

import dataclasses
import functools
import gc
import threading

import preflash
import pytest
import torch
import wrapper_options
from fuzz.pod_trial import plan_decode
from graph_stage import Limits, Stage, capture, recorder  # noqa: F401
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.case import Sinks

PAGED = Case("paged", (9, 3), (700, 90), 4, 2, 64, page_size=16, fixed_split_size=64)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
# One request of one head: its keys are split wherever there is more than one processor.
ROW = Case("row", (1,), (3000,), 1, 1, 64, page_size=16)
PREFILL = Case("prefill", (5,), (40,), 1, 1, 64)


class Planned:
    """A wrapper with its workspace, and a result to compare with the oracle's."""

    def __init__(self, target, kind):
        self.target, self.kind = target, kind
        self.workspace = runner.workspace(target.device, 4 << 20)
        getattr(self, f"_make_{kind}")()
        self.plan()

    def plan(self):
        getattr(self, f"_plan_{self.kind}")()

    def check(self):
        """run(), against the oracle."""
        getattr(self, f"_check_{self.kind}")()

    @property
    def needed(self):
        """Bytes of the float workspace."""
        wrapper = self.wrapper
        if self.kind in RUN_PLANS:
            return wrapper._pod_plans.last.launch.plan.float_bytes
        return (wrapper._levels[0] if self.kind == "cascade" else wrapper)._plan_info.float_bytes

    def _make(self, case, wrapper):
        self.inputs = build(case, device=self.target.device)
        self.wrapper = wrapper

    def _of_batch(self, case, **options):
        made = functools.partial(
            runner.make_wrapper, case, backend=self.target.backend, buffer=self.workspace
        )
        self._make(case, made(**options))

    def _plan_wrapper(self):
        runner.plan(self.wrapper, self.inputs)

    def _check_wrapper(self):
        runner.compare(self.inputs, *runner.run(self.wrapper, self.inputs)).check()

    def _make_paged(self):
        self._of_batch(PAGED)

    def _make_ragged(self):
        self._of_batch(RAGGED)

    def _make_graphs(self):
        inputs = build(PAGED, device=self.target.device)
        self._of_batch(PAGED, **wrapper_options.graph_options(inputs))

    _plan_paged = _plan_ragged = _plan_graphs = _plan_wrapper
    _check_paged = _check_ragged = _check_graphs = _check_wrapper

    def _make_repeated(self):
        self._of_batch(PAGED)

    _plan_repeated = _plan_wrapper

    def _check_repeated(self):
        """Runs without an LSE: from the second run on, C++ alone checks the tensors."""
        out = self.wrapper.run(self.inputs.q, self.inputs.cache)
        _, lse = runner.run(self.wrapper, self.inputs)
        runner.compare(self.inputs, out, lse).check()

    def _make_sinks(self):
        kind = preflash.BatchAttentionWithAttentionSinkWrapper
        wrapper = kind(
            self.workspace, backend=self.target.backend, head_dim_qk=64, head_dim_vo=64,
            q_data_type=PAGED.dtype, kv_data_type=PAGED.dtype,
        )  # fmt: skip
        self._make(dataclasses.replace(PAGED, sinks=Sinks.MIXED), wrapper)

    def _check_sinks(self):
        inputs = self.inputs
        scale = inputs.case.scale
        result = self.wrapper.run(inputs.q, inputs.cache, inputs.sinks, scale, return_lse=True)
        runner.compare(inputs, *result).check()

    _plan_sinks = _plan_wrapper

    def _make_decode(self):
        kind = preflash.BatchDecodeWithPagedKVCacheWrapper
        self._make(ROW, kind(self.workspace, backend=self.target.backend))

    def _table(self):
        inputs = self.inputs
        return (inputs.kv_indptr, inputs.indices, inputs.last_page_len)

    def _plan_decode(self):
        plan_decode(self.wrapper, ROW, self._table(), fixed_split_size=64)

    _check_decode = _check_wrapper

    def _make_cascade(self):
        kind = preflash.MultiLevelCascadeAttentionWrapper
        self._make(ROW, kind(1, self.workspace))

    def _plan_cascade(self):
        table = ([self.inputs.qo_indptr], *([array] for array in self._table()))
        self.wrapper.plan(*table, 1, 1, 64, 16, q_data_type=ROW.dtype, sm_scale=ROW.sm_scale)

    def _check_cascade(self):
        out = self.wrapper.run(self.inputs.q, self.inputs.cache)
        lse = self.wrapper._levels[0].run(self.inputs.q, self.inputs.cache, return_lse=True)[1]
        runner.compare(self.inputs, out, lse).check()

    def _make_pod(self):
        kind = preflash.PODWithPagedKVCacheWrapper
        self._make(ROW, kind(self.workspace, backend=self.target.backend))
        self.prefill = build(PREFILL, device=self.target.device)

    def _plan_pod(self):
        plan_decode(self.wrapper, ROW, self._table())

    def _check_pod(self):
        p, d = self.prefill, self.inputs
        results = self.wrapper.run_return_lse(p.q, p.k[:40], p.v[:40], d.q, d.cache)
        for inputs, result in zip((p, d), results, strict=True):
            runner.compare(inputs, *result).check()

    def _make_batch_pod(self):
        kind = preflash.BatchPODWithPagedKVCacheWrapper
        self._make(ROW, kind(self.workspace, backend=self.target.backend))
        self.prefill = build(dataclasses.replace(PREFILL, page_size=16), device=self.target.device)

    def _plan_batch_pod(self):
        tables = [
            (i.qo_indptr, i.kv_indptr, i.indices, i.last_page_len)
            for i in (self.prefill, self.inputs)
        ]
        self.wrapper.plan(*tables[0], *tables[1], 1, 1, 64, 16, q_data_type=ROW.dtype)

    def _check_batch_pod(self):
        p, d = self.prefill, self.inputs
        results = self.wrapper.run(p.q, p.cache, d.q, d.cache, return_lse=True)
        for inputs, result in zip((p, d), results, strict=True):
            runner.compare(inputs, *result).check()


RUN_PLANS = ("pod", "batch_pod")  # run() plans both sides, with the workspace as it is then
KINDS = (
    "paged", "ragged", "graphs", "repeated", "sinks", "decode", "cascade", "pod", "batch_pod",
)  # fmt: skip


def shrunk_data(tensor):
    memory = torch.full((1 << 20,), 7, dtype=tensor.dtype, device=tensor.device)
    tensor.data = memory[64:80]
    return memory, 16


def shrunk_storage(tensor):
    tensor.untyped_storage().resize_(100)
    return None, 100


def freed_storage(tensor):
    tensor.untyped_storage().resize_(0)
    return None, 0


def set_to_less(tensor):
    memory = torch.full((16,), 7, dtype=tensor.dtype, device=tensor.device)
    tensor.set_(memory)
    return memory, 16


SHRINKS = (shrunk_data, shrunk_storage, freed_storage, set_to_less)
each_shrink = pytest.mark.parametrize("shrink", SHRINKS, ids=lambda f: f.__name__)


# --- The float workspace -----------------------------------------------------


@each_shrink
@pytest.mark.parametrize("seen", ["first", "cached"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_float_workspace_that_shrank(target, kind, seen, shrink):
    made = Planned(target, kind)
    if seen == "cached" or kind in RUN_PLANS:
        made.check()
    if seen == "cached":
        made.check()
    needed = made.needed
    if needed == 0:
        pytest.skip("one processor: no keys are split")
    memory, there = shrink(made.workspace)
    message = f"float_workspace_buffer has {there} bytes; this plan needs {needed}"
    with pytest.raises(ValueError, match=message):
        made.check()
    if memory is not None:
        assert bool((memory == 7).all())
    # As much as there was, elsewhere, is as good; and a plan() takes what there is.
    made.workspace.data = torch.zeros(4 << 20, dtype=torch.uint8, device=target.device)
    made.check()
    shrink(made.workspace)
    if made.inputs.case.fixed_split_size or kind == "decode":
        return  # such a split needs what it needs
    made.plan()
    made.check()


def test_a_float_workspace_with_gaps(target):
    made = Planned(target, "paged")
    memory = torch.full((8 << 20,), 7, dtype=torch.uint8, device=target.device)
    made.workspace.data = memory[::2]
    for call in (made.check, made.plan):
        with pytest.raises(ValueError, match=r"float_workspace_buffer .* contiguous"):
            call()
    assert bool((memory == 7).all())


# --- The int workspace -------------------------------------------------------


def moved_storage(tensor):
    tensor.data = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return None, None


def with_int_workspace(target, inputs, int_workspace, **options):
    buffer = runner.workspace(target.device, 64 << 20)
    made = runner.make_wrapper(
        inputs.case, backend=target.backend, device=target.device, buffer=buffer, **options
    )
    made.reset_workspace_buffer(buffer, int_workspace)
    runner.plan(made, inputs)
    return made


@pytest.mark.parametrize("replace", [*SHRINKS, moved_storage], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seen", ["first", "cached"])
def test_an_int_workspace_that_was_replaced(target, seen, replace):
    inputs = build(PAGED, device=target.device)
    int_workspace = runner.workspace(target.device, 1 << 20)
    wrapper = with_int_workspace(target, inputs, int_workspace)
    needed = wrapper._plan_info.int_bytes
    for _ in range(2 * (seen == "cached")):
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
        wrapper.run(inputs.q, inputs.cache)
    _, there = replace(int_workspace)
    message = {
        None: "is at another address",
        0: f"has no memory .* needs {needed} bytes",
    }.get(there, f"has {there} bytes and needs {needed}")
    for run in (
        lambda: runner.run(wrapper, inputs),
        lambda: wrapper.run(inputs.q, inputs.cache),
    ):
        with pytest.raises(ValueError, match=f"int_workspace_buffer {message}"):
            run()
    if there is not None:
        with pytest.raises(ValueError, match=f"int_workspace_buffer has {there} bytes; .* needs"):
            runner.plan(wrapper, inputs)
        int_workspace.data = runner.workspace(target.device, 1 << 20)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


# --- Buffers of CUDA graphs --------------------------------------------------

LIKE = Case("graphs", (), (), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
BATCH = ((30, 5, 0), (100, 90, 7))
BUFFERS = (
    "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf",
    "custom_mask_buf", "mask_indptr_buf",
)  # fmt: skip
READ_BY_KERNELS = ("paged_kv_indices_buf", "custom_mask_buf")


def staged(target, like=LIKE, **options):
    limits = Limits(batch=3, rows=40, pages=90 if like.paged else 0, tokens=600)
    return Stage(like, limits, target, masked=like.mask is MaskKind.CUSTOM, **options)


@pytest.mark.parametrize("replace", [*SHRINKS, moved_storage], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BUFFERS)
def test_plan_refuses_buffers_that_were_replaced(target, name, replace):
    stage = staged(target)
    inputs = stage.make(*BATCH)
    stage.plan(inputs)
    stage.run()
    stage.check(inputs)
    memory, _ = replace(stage.buffers[name])
    for given in (inputs, stage.make(*BATCH, seed=1, on_host=False)):
        with pytest.raises(ValueError, match=f"{name} .* since the constructor"):
            stage.plan(given)
    if memory is not None:
        assert bool((memory == 7).all())


@pytest.mark.parametrize("name", ["qo_indptr_buf", "kv_indptr_buf"])
def test_plan_refuses_ragged_buffers_that_were_freed(target, name):
    like = dataclasses.replace(LIKE, page_size=0, mask=MaskKind.NONE)
    stage = staged(target, like)
    inputs = stage.make(*BATCH)
    stage.plan(inputs)
    freed_storage(stage.buffers[name])
    with pytest.raises(ValueError, match=f"{name} has no memory"):
        stage.plan(inputs)


@pytest.mark.parametrize("replace", [*SHRINKS, moved_storage], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seen", ["first", "cached"])
@pytest.mark.parametrize("name", READ_BY_KERNELS)
def test_run_refuses_buffers_that_were_replaced(target, name, seen, replace):
    stage = staged(target)
    inputs = stage.make(*BATCH)
    stage.plan(inputs)
    if seen == "cached":
        stage.run()
        stage.wrapper.run(stage.q, *stage.cache())
        stage.wrapper.run(stage.q, *stage.cache())
    replace(stage.buffers[name])
    stage.out.fill_(float("nan"))
    for run in (stage.run, lambda: stage.wrapper.run(stage.q, *stage.cache(), out=stage.out)):
        with pytest.raises(ValueError, match=name):
            run()
    assert bool(stage.out.isnan().all())


@pytest.mark.parametrize("name", READ_BY_KERNELS)
def test_other_options_refuse_buffers_that_were_freed_before(target, name):
    """Plans made by forward() would find only the offset as a freed buffer's address."""
    stage = staged(target)
    inputs = stage.make(*BATCH)
    whole = torch.zeros(4096, dtype=stage.buffers[name].dtype, device=target.device)
    buffers = {**stage.buffers, name: whole[64 : 64 + stage.buffers[name].numel()]}
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), use_cuda_graph=True, backend=target.backend, **buffers
    )
    stage.load(inputs)
    runner.plan(wrapper, inputs)
    wrapper.run(stage.q, *stage.cache())
    freed_storage(whole)
    for call in (
        lambda: wrapper.forward(stage.q, *stage.cache(), logits_soft_cap=30.0),
        lambda: wrapper.run(stage.q, *stage.cache(), window_left=20),
    ):
        with pytest.raises(ValueError, match=name):
            call()


@pytest.mark.parametrize("name", BUFFERS[1:4])
def test_decode_and_pod_refuse_buffers_that_were_freed(target, name):
    inputs = build(ROW, device=target.device)
    buffers = [
        torch.zeros(n, dtype=torch.int32, device=target.device)
        for n in (2, inputs.indices.numel(), 1)
    ]
    names = BUFFERS[1:4]
    prefill = build(PREFILL, device=target.device)
    for kind in (
        preflash.BatchDecodeWithPagedKVCacheWrapper,
        preflash.PODWithPagedKVCacheWrapper,
    ):
        own = {f"{n}fer": b.clone() for n, b in zip(names, buffers, strict=True)}
        wrapper = kind(runner.workspace(target.device), "NHD", True, backend=target.backend, **own)
        table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        plan_decode(wrapper, ROW, table)
        run = functools.partial(wrapper.run, inputs.q, inputs.cache)
        if kind is preflash.PODWithPagedKVCacheWrapper:
            p = prefill
            run = functools.partial(wrapper.run, p.q, p.k, p.v, inputs.q, inputs.cache)
        run()
        freed_storage(own[f"{name}fer"])
        if name in READ_BY_KERNELS:
            with pytest.raises(ValueError, match=f"{name} has no memory"):
                run()
        with pytest.raises(ValueError, match=f"{name} has no memory"):
            plan_decode(wrapper, ROW, table)


@pytest.mark.parametrize("replace", [*SHRINKS, moved_storage], ids=lambda f: f.__name__)
def test_plan_refuses_workspaces_that_a_graph_has_lost(target, recorder, replace):  # noqa: F811
    like = dataclasses.replace(LIKE, mask=MaskKind.CAUSAL, fixed_split_size=64)
    workspace = runner.workspace(target.device, 64 << 20)
    stage = staged(target, like, workspace=workspace)
    inputs = stage.make(*BATCH)
    stage.plan(inputs)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    stage.plan(inputs)
    graph.replay()
    stage.check(inputs)
    replace(workspace)
    with pytest.raises(ValueError, match=r"float_workspace_buffer"):
        stage.plan(inputs)


def test_page_indices_on_the_device_that_were_freed(target):
    """Page indices on the device are used in place, not copied by plan()."""
    if target.device == "cpu":
        pytest.skip("page indices on the CPU are copied")
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.run(wrapper, inputs)
    freed_storage(inputs.indices)
    with pytest.raises(ValueError, match="paged_kv_indices has no memory"):
        runner.run(wrapper, inputs)


# --- Page indices on the CPU -------------------------------------------------


class CpuTarget:
    device = backend = "cpu"


@pytest.mark.parametrize("page", [2**30, 90, -1, -(2**31)])
@pytest.mark.parametrize("seen", ["first", "cached"])
def test_page_indices_that_were_overwritten(page, seen):
    stage = staged(CpuTarget)
    inputs = stage.make(*BATCH)
    stage.plan(inputs)
    indices = stage.buffers["paged_kv_indices_buf"]
    calls = (stage.run, lambda: stage.wrapper.run(stage.q, *stage.cache(), out=stage.out))
    if seen == "cached":
        for _ in range(2):
            for run in calls:
                run()
    used = int(inputs.kv_indptr[-1])
    for at in (0, used - 1):
        right = int(indices[at])
        indices[at] = page
        stage.load(inputs)
        for run in calls:
            with pytest.raises(ValueError, match=f"paged_kv_indices holds {page};"):
                run()
        assert bool(stage.out.isnan().all())
        indices[at] = right
    indices[used:] = page  # nobody's
    stage.run()
    stage.check(inputs)


def test_page_indices_of_pod_that_were_overwritten():
    inputs, prefill = build(ROW), build(PREFILL)
    buffers = {
        "paged_kv_indptr_buffer": torch.zeros(2, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(inputs.indices.numel(), dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.zeros(1, dtype=torch.int32),
    }
    wrapper = preflash.PODWithPagedKVCacheWrapper(runner.workspace(), "NHD", True, **buffers)
    plan_decode(wrapper, ROW, (inputs.kv_indptr, inputs.indices, inputs.last_page_len))
    for _ in range(2):
        buffers["paged_kv_indices_buffer"][3] = 2**30
        with pytest.raises(ValueError, match=f"paged_kv_indices holds {2**30}"):
            wrapper.run(prefill.q, prefill.k, prefill.v, inputs.q, inputs.cache)
        buffers["paged_kv_indices_buffer"][3] = inputs.indices[3]
        _, out = wrapper.run_return_lse(
            prefill.q, prefill.k[:40], prefill.v[:40], inputs.q, inputs.cache
        )
        runner.compare(inputs, *out).check()


# --- One int workspace of two wrappers ---------------------------------------

OTHERS = "holds the work list of another wrapper"


def inputs_of(target, seed, **options):
    return build(dataclasses.replace(PAGED, **options), device=target.device, seed=seed)


def test_a_work_list_of_another_wrapper(target):
    shared = runner.workspace(target.device, 1 << 20)
    a, b = inputs_of(target, 0), inputs_of(target, 1, qo_lens=(40, 1), kv_lens=(33, 1500))
    first = with_int_workspace(target, a, shared)
    runner.compare(a, *runner.run(first, a)).check()
    first.run(a.q, a.cache)
    second = with_int_workspace(target, b, shared)
    for run in (lambda: runner.run(first, a), lambda: first.run(a.q, a.cache)):
        with pytest.raises(ValueError, match=OTHERS):
            run()
    runner.compare(b, *runner.run(second, b)).check()
    # Each plan() before its run(), as engines that share one do.
    for _ in range(2):
        runner.plan(first, a)
        runner.compare(a, *runner.run(first, a)).check()
        with pytest.raises(ValueError, match=OTHERS):
            runner.run(second, b)
        runner.plan(second, b)
        runner.compare(b, *runner.run(second, b)).check()


@pytest.mark.parametrize("shift", [0, 16, 256, 4096, 1 << 19])
def test_int_workspaces_that_overlap(target, shift):
    memory = runner.workspace(target.device, 2 << 20)
    a, b = inputs_of(target, 0), inputs_of(target, 1)
    for order in (1, -1):
        parts = (memory[: 1 << 20], memory[shift : shift + (1 << 20)])[::order]
        first = with_int_workspace(target, a, parts[0])
        second = with_int_workspace(target, b, parts[1])
        if shift < first._plan_info.int_bytes:
            with pytest.raises(ValueError, match=OTHERS):
                runner.run(first, a)
        else:
            runner.compare(a, *runner.run(first, a)).check()
        runner.compare(b, *runner.run(second, b)).check()


def test_the_work_list_of_a_wrapper_as_the_workspace_of_another(target):
    """Engines give the one's _int_workspace_buffer to the other."""
    a, b = inputs_of(target, 0), inputs_of(target, 1)
    first = runner.make_wrapper(a.case, backend=target.backend, device=target.device)
    runner.plan(first, a)
    second = with_int_workspace(target, b, first._int_workspace_buffer)
    with pytest.raises(ValueError, match=OTHERS):
        runner.run(first, a)
    runner.compare(b, *runner.run(second, b)).check()
    runner.plan(first, a)  # into memory of its own again
    runner.compare(a, *runner.run(first, a)).check()
    runner.compare(b, *runner.run(second, b)).check()


def test_a_shared_float_workspace_stays_allowed(target):
    shared = runner.workspace(target.device, 8 << 20)
    cases = [inputs_of(target, seed) for seed in range(3)]
    wrappers = [
        runner.make_wrapper(i.case, backend=target.backend, device=target.device, buffer=shared)
        for i in cases
    ]
    for wrapper, inputs in zip(wrappers, cases, strict=True):
        runner.plan(wrapper, inputs)
    for _ in range(2):
        for wrapper, inputs in zip(wrappers, cases, strict=True):
            runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_memory_that_was_freed_and_allocated_again(target):
    """A wrapper that is gone has no claim on what another one allocates."""
    kept = []
    for seed in range(12):
        inputs = inputs_of(target, seed)
        for _ in range(3):
            gone = with_int_workspace(target, inputs, runner.workspace(target.device, 1 << 18))
            del gone
            gc.collect()
        wrapper = with_int_workspace(target, inputs, runner.workspace(target.device, 1 << 18))
        kept.append((wrapper, inputs))
    for wrapper, inputs in kept:
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_a_smaller_plan_leaves_the_memory_behind_it(target):
    """The int workspace holds the latest plan; another wrapper may use the memory after it."""
    memory = runner.workspace(target.device, 4 << 20)
    large = inputs_of(target, 0, qo_lens=(300, 200), kv_lens=(4000, 4000))
    small = inputs_of(target, 1)
    first = with_int_workspace(target, large, memory)
    size = first._plan_info.int_bytes
    runner.plan(first, small)
    begin = -(-first._plan_info.int_bytes // 64) * 64
    assert begin < size
    second = with_int_workspace(target, small, memory[begin:])
    for wrapper in (first, second):
        runner.compare(small, *runner.run(wrapper, small)).check()


def test_captured_runs_and_plans_of_graphs(target, recorder):  # noqa: F811
    """Planning into the captured place again keeps it the wrapper's own."""
    stages = [staged(target), staged(target)]
    shared = runner.workspace(target.device, 1 << 20)
    graphs = []
    for stage in stages:
        stage.wrapper.reset_workspace_buffer(runner.workspace(target.device), shared)
    for stage in stages:
        inputs = stage.make(*BATCH)
        stage.plan(inputs)
        stage.run()
        graphs.append(capture(recorder, target.device, stage.run))
    for seed in range(3):
        for stage, graph in zip(stages, graphs, strict=True):
            inputs = stage.make(*BATCH, seed=seed)
            stage.plan(inputs)
            graph.replay()
            stage.check(inputs)
        with pytest.raises(ValueError, match=OTHERS):
            stages[0].run()


def test_threads_with_workspaces_of_their_own(target):
    failures = []

    def work(seed):
        try:
            own = runner.workspace(target.device, 1 << 18)
            inputs = inputs_of(target, seed, qo_lens=(2, 1), kv_lens=(90, 70))
            wrapper = with_int_workspace(target, inputs, own)
            for _ in range(20):
                runner.plan(wrapper, inputs)
                runner.run(wrapper, inputs)
            runner.compare(inputs, *runner.run(wrapper, inputs)).check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
