"""Who owns what, for how long: memory across streams, plans under graphs, threads and processes."""

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor

import preflash
import pytest
import torch
from backends import captured, on_cases, output_of, overwrite_freed_memory, replay, sleep
from preflash.testing import Case, MaskKind, build, reference, runner

single = preflash.single_prefill_with_kv_cache
LENS = (33, 5, 0, 170), (400, 90, 7, 170)
CASE = Case("life", *LENS, 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL)
SPLIT = dataclasses.replace(CASE, fixed_split_size=128)
DECODE = dataclasses.replace(CASE, qo_lens=(1, 1, 1, 1))


@pytest.mark.parametrize("plans_again", [False, True])
@on_cases([CASE, SPLIT])
def test_memory_in_use_on_another_stream_is_not_handed_out(backend, case, plans_again):
    """Plans on one stream, runs on another, and plans again or drops the wrapper meanwhile."""
    inputs, other = build(case, device="cuda"), build(DECODE, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    buffer_bytes = 8 << 20
    with torch.cuda.stream(first):
        buffer = runner.workspace("cuda", buffer_bytes)
        wrapper = runner.make_wrapper(case, backend=backend, device="cuda", buffer=buffer)
        runner.plan(wrapper, inputs)
    positional, options = runner.plan_arguments(inputs)
    sizes = (buffer_bytes, wrapper.workspace_size(*positional, **options)[1], 4096, 64 * 1024)
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        runner.plan(wrapper, inputs)
        out = torch.empty(inputs.q.shape, dtype=case.dtype, device="cuda")
        sleep(100)
        wrapper.run(inputs.q, inputs.cache, out=out)
    for _ in range(3 * plans_again):
        with torch.cuda.stream(first):
            runner.plan(wrapper, other)
            overwrite_freed_memory(*sizes[1:])
    del wrapper, buffer
    gc.collect()
    for stream in (first, second):
        with torch.cuda.stream(stream):
            overwrite_freed_memory(*sizes)
    torch.cuda.synchronize()
    runner.compare(inputs, out, None).check()


def capture_single(*tensors, **options) -> tuple:
    """Captures a single request, whose plan others evict; returns the graph and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        single(*tensors, **options)
    torch.cuda.synchronize()
    made = captured(lambda: single(*tensors, **options), stream)
    with torch.cuda.stream(stream):
        for tokens in range(1, 90):
            q = torch.randn(tokens, 8, 128, device="cuda").bfloat16()
            single(q, q, q, backend=options["backend"])
    return made


@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "in a thread"])
@pytest.mark.parametrize(
    ("kv_len", "masked"), [(200, False), (30_000, False), (200, True)], ids=str
)
def test_single_in_a_graph_outlives_the_cache_of_plans(backend, kv_len, masked, in_thread):
    q = torch.randn(17, 8, 128, device="cuda").bfloat16()
    k, v = torch.randn(2, kv_len, 2, 128, device="cuda").bfloat16()
    mask = torch.ones(17, kv_len, dtype=torch.bool, device="cuda").tril(kv_len - 17)
    packed = preflash.packbits(mask.flatten(), bitorder="little")
    options = {"backend": backend} | ({"packed_custom_mask": packed} if masked else {})
    expected = single(q, k, v, **options).clone()
    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(capture_single, q, k, v, **options).result()
    else:
        made = capture_single(q, k, v, **options)
    graph, out = made
    gc.collect()
    overwrite_freed_memory()
    for _ in range(3):
        replay(graph, out)
        assert torch.equal(out, expected)


def test_captures_of_single_requests_that_are_refused(backend):
    q = torch.randn(23, 8, 128, device="cuda").bfloat16()
    mask = torch.ones(23, 23, dtype=torch.bool, device="cuda").tril()
    with pytest.raises(RuntimeError, match="call it once before"):
        captured(lambda: single(q, q, q, backend=backend))
    with pytest.raises(RuntimeError, match="packed_custom_mask"):
        capture_single(q, q, q, backend=backend, custom_mask=mask)
    assert bool(single(q, q, q, backend=backend).isfinite().all())


@on_cases([CASE, SPLIT])
def test_a_captured_run_replays_its_own_plan(backend, case):
    """The graph has the plan of its capture, whose upload ends before, and later numbers."""
    other = build(DECODE, device="cuda")
    inputs = build(case, device="cuda", index_device="cpu")
    wrapper = runner.planned(inputs, backend=backend)
    out, lse = runner.run(wrapper, inputs)
    torch.cuda.synchronize()
    runner.plan(wrapper, inputs)
    graph, _ = captured(lambda: runner.run(wrapper, inputs, out=out, lse=lse))
    for _ in range(3):
        runner.plan(wrapper, other)
        overwrite_freed_memory()
    for factor in (1.0, 0.5, -2.0):
        inputs.q.mul_(factor)
        replay(graph, out, lse)
        runner.compare(inputs, out, lse).check()


def test_four_threads_on_four_streams(backend):
    """Each plans and runs batch after batch; nothing of one reaches another."""
    cases = (CASE, SPLIT, DECODE, dataclasses.replace(SPLIT, qo_lens=(9, 200, 1, 64)))
    made = [build(one, device="cuda", index_device="cpu", seed=i) for i, one in enumerate(cases)]
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
    from backends import planned
    from preflash.testing import Case, runner

    faulthandler.dump_traceback_later(90, exit=True)
    wrapper, inputs = planned(Case("lock", (64,), (64,), 2, 2, 64), sys.argv[1])
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
    torch.cuda.synchronize()
    assert calls == [1]
    runner.compare(inputs, out, None).check()
"""


def test_a_full_queue_waits_without_the_interpreters_lock(backend):
    """A host callback in Python, in front of more launches than the queue holds."""
    output_of(HOST_CALLBACK, backend)


FORK = """
    import gc, os, sys
    from backends import check_run, planned
    from preflash.testing import Case, build, runner

    case = Case("fork", (70, 3), (300, 200), 4, 2, 64)
    wrapper, inputs = planned(case, sys.argv[1])
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
    check_run(wrapper, inputs)
"""


def test_a_forked_child_leaves_the_gpu_alone(backend):
    output_of(FORK, backend)
