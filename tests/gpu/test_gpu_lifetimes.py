"""Who owns what, for how long: memory across streams, plans under graphs, threads and processes."""

import dataclasses
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import preflash
import pytest
import torch
from backends import captured, on_every_backend, overwrite_freed_memory, passes, planned
from preflash.testing import Case, MaskKind, build, reference, runner

pytestmark = pytest.mark.gpu

CASE = Case(
    "life", (33, 5, 0, 170), (400, 90, 7, 170), 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL
)
SPLIT = dataclasses.replace(CASE, name="split", fixed_split_size=128)
DECODE = dataclasses.replace(CASE, qo_lens=(1, 1, 1, 1))


@on_every_backend
@pytest.mark.parametrize("case", [CASE, SPLIT], ids=lambda case: case.name)
def test_memory_in_use_on_another_stream_is_not_handed_out(backend, case):
    """Planned on one stream, planned again and run on another, and dropped while it runs."""
    inputs = build(case, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    buffer_bytes = 8 << 20
    with torch.cuda.stream(first):
        buffer = runner.workspace("cuda", buffer_bytes)
        wrapper = runner.make_wrapper(case, backend=backend, device="cuda", buffer=buffer)
        runner.plan(wrapper, inputs)
    positional, options = runner.plan_arguments(inputs)
    int_bytes = wrapper.workspace_size(*positional, **options)[1]
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        runner.plan(wrapper, inputs)
        out = torch.empty(inputs.q.shape, dtype=case.dtype, device="cuda")
        torch.cuda._sleep(200_000_000)
        wrapper.run(inputs.q, inputs.cache, out=out)
    del wrapper, buffer
    gc.collect()
    for stream in (first, second):
        with torch.cuda.stream(stream):
            taken = overwrite_freed_memory(buffer_bytes, int_bytes, 64 * 1024)
    torch.cuda.synchronize()
    del taken
    runner.compare(inputs, out, None).check()


@on_every_backend
def test_a_plan_does_not_touch_the_work_list_of_the_one_before(backend):
    """run() waits on one stream; plan() of another batch is done on a second one meanwhile."""
    other = build(DECODE, device="cuda")
    wrapper, inputs = planned(CASE, backend)
    out = torch.empty_like(inputs.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        wrapper.run(inputs.q, inputs.cache, out=out)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            runner.plan(wrapper, other)
            taken = overwrite_freed_memory(4096, 64 * 1024)
    torch.cuda.synchronize()
    del taken
    runner.compare(inputs, out, None).check()


# --- CUDA graphs -------------------------------------------------------------


def single(q, k, v, backend, **options):
    return preflash.single_prefill_with_kv_cache(q, k, v, backend=backend, **options)


def evict_single_plans(backend) -> None:
    for tokens in range(1, 90):
        q = torch.randn(tokens, 8, 128, device="cuda").bfloat16()
        single(q, q, q, backend)


def stream_after_the_current() -> torch.cuda.Stream:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


@on_every_backend
@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "in a thread"])
@pytest.mark.parametrize("kv_len", [200, 30_000], ids=["whole", "split"])
def test_single_in_a_graph_outlives_the_cache_of_plans(backend, kv_len, in_thread):
    q = torch.randn(17, 8, 128, device="cuda").bfloat16()
    k, v = torch.randn(2, kv_len, 2, 128, device="cuda").bfloat16()
    expected = single(q, k, v, backend).clone()
    made = []

    def capture():
        stream = stream_after_the_current()
        with torch.cuda.stream(stream):
            single(q, k, v, backend)
        torch.cuda.synchronize()
        made.extend(captured(lambda: single(q, k, v, backend), stream))
        with torch.cuda.stream(stream):
            evict_single_plans(backend)

    if in_thread:
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join()
    else:
        capture()
    graph, out = made
    gc.collect()
    taken = overwrite_freed_memory()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    del taken


@on_every_backend
def test_single_without_a_plan_refuses_the_capture(backend):
    q = torch.randn(23, 8, 128, device="cuda").bfloat16()
    with pytest.raises(RuntimeError, match="call it once before"):
        captured(lambda: single(q, q, q, backend))
    assert bool(single(q, q, q, backend).isfinite().all())


@on_every_backend
def test_a_dense_mask_in_a_graph_is_refused(backend):
    q = torch.randn(23, 8, 128, device="cuda").bfloat16()
    mask = torch.ones(23, 23, dtype=torch.bool, device="cuda").tril()
    expected = single(q, q, q, backend, causal=True)
    stream = stream_after_the_current()
    with torch.cuda.stream(stream):
        single(q, q, q, backend, custom_mask=mask)
    packed = preflash.packbits(mask.flatten(), bitorder="little")
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="packed_custom_mask"):
        captured(lambda: single(q, q, q, backend, custom_mask=mask), stream)
    graph, out = captured(lambda: single(q, q, q, backend, packed_custom_mask=packed), stream)
    with torch.cuda.stream(stream):
        evict_single_plans(backend)
    gc.collect()
    taken = overwrite_freed_memory()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    del taken
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@on_every_backend
@pytest.mark.parametrize("case", [CASE, SPLIT], ids=lambda case: case.name)
def test_a_captured_run_replays_its_own_plan(backend, case):
    """The graph has the plan of that time, and reads the numbers of the time of its replay. A
    capture cannot wait for the plan's upload, which is waited for beforehand."""
    other = build(DECODE, device="cuda")
    inputs = build(case, device="cuda", index_device="cpu")
    wrapper = runner.planned(inputs, backend=backend)
    out, lse = runner.run(wrapper, inputs)
    torch.cuda.synchronize()
    runner.plan(wrapper, inputs)
    graph, _ = captured(lambda: runner.run(wrapper, inputs, out=out, lse=lse))
    for _ in range(3):
        runner.plan(wrapper, other)
        taken = overwrite_freed_memory()
    for factor in (1.0, 0.5, -2.0):
        inputs.q.mul_(factor)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        runner.compare(inputs, out, lse).check()
    del taken


# --- threads and processes ---------------------------------------------------

BATCHES = [
    CASE,
    dataclasses.replace(CASE, name="split", fixed_split_size=64),
    dataclasses.replace(DECODE, kv_lens=(900, 3, 40, 0)),
    dataclasses.replace(
        CASE, qo_lens=(9, 200, 1, 64), kv_lens=(30, 700, 0, 64), fixed_split_size=64
    ),
]


@on_every_backend
def test_four_threads_on_four_streams(backend):
    """Each plans and runs batch after batch; nothing of one reaches another."""
    made = [build(one, device="cuda", index_device="cpu", seed=i) for i, one in enumerate(BATCHES)]
    expected = [reference(inputs) for inputs in made]
    torch.cuda.synchronize()

    def work(seed: int) -> list:
        results = []
        with torch.cuda.stream(torch.cuda.Stream()):
            wrapper = runner.make_wrapper(CASE, backend=backend, device="cuda")
            for i in range(seed, seed + 9):
                inputs = made[i % len(made)]
                runner.plan(wrapper, inputs)
                results.append((i % len(made), runner.run(wrapper, inputs)))
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            for i, result in results:
                runner.compare(made[i], *result, expected=expected[i]).check()


HOST_CALLBACK = """
    import ctypes, faulthandler, sys
    import torch
    from preflash.testing import Case, build, runner

    faulthandler.dump_traceback_later(90, exit=True)
    case = Case("lock", (64,), (64,), 2, 2, 64)
    inputs = build(case, device="cuda")
    wrapper = runner.make_wrapper(case, backend=sys.argv[1], device="cuda")
    runner.plan(wrapper, inputs)
    out = torch.empty_like(inputs.q)
    wrapper.run(inputs.q, inputs.k, inputs.v, out=out)
    torch.cuda.synchronize()
    calls = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(1))
    torch.cuda._sleep(4_000_000_000)  # the queue fills up meanwhile
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, callback, None) == 0
    for _ in range(5000):
        wrapper.run(inputs.q, inputs.k, inputs.v, out=out)
    assert not calls or len(calls) == 1
    torch.cuda.synchronize()
    assert calls == [1]
    runner.compare(inputs, out, None).check()
    print("passed")
"""


@on_every_backend
def test_a_full_queue_waits_without_the_interpreters_lock(backend):
    """A host callback in Python, in front of more launches than the queue holds."""
    passes(HOST_CALLBACK, backend)


FORK = """
    import gc, os, sys
    import torch
    from preflash.testing import Case, build, runner

    case = Case("fork", (70, 3), (300, 200), 4, 2, 64)
    inputs = build(case, device="cuda")
    wrapper = runner.make_wrapper(case, backend=sys.argv[1], device="cuda")
    runner.plan(wrapper, inputs)
    runner.run(wrapper, inputs)
    child = os.fork()
    if child == 0:
        # A data loader's worker: it computes on the CPU, and drops what it has inherited.
        runner.check(build(case), backend="cpu")
        del wrapper
        gc.collect()
        runner.check(build(case), backend="cpu")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    print("passed")
"""


@on_every_backend
def test_a_forked_child_leaves_the_gpu_alone(backend):
    passes(FORK, backend)
