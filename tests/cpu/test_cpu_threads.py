"""Callers of the CPU backend run at once, each with its own number of threads."""

import itertools
import json
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner
from preflash_harness import threads
from processes import python


@pytest.fixture(autouse=True)
def _own_thread_count():
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def use_threads(num_threads):
    """Sets torch's count of the calling Python thread."""
    torch.get_num_threads()  # a thread's first call takes over what any thread set last
    torch.set_num_threads(num_threads)


def in_threads(*functions):
    """Runs the functions at once, each in its own Python thread; returns their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(f) for f in functions]]


def test_a_short_call_does_not_wait_for_a_long_one():
    q = torch.randn(6144, 8, 128, dtype=torch.bfloat16)
    short = torch.randn(4, 8, 128, dtype=torch.bfloat16)
    started, finished = threading.Event(), threading.Event()

    def long_call():
        use_threads(2)
        started.set()
        preflash.single_prefill_with_kv_cache(q, q, q, causal=True)
        finished.set()

    def short_calls():
        use_threads(2)
        preflash.single_prefill_with_kv_cache(short, short, short)  # plans
        started.wait()
        finished.wait(0.05)
        for _ in range(3):
            preflash.single_prefill_with_kv_cache(short, short, short)
        return finished.is_set()

    _, waited = in_threads(long_call, short_calls)
    assert not waited, "three calls of 4 tokens took as long as a prefill of 6144 tokens"


def test_every_call_has_its_own_number_of_threads():
    """A call starts helpers up to the number of its own Python thread, whatever others have set."""
    python("""
        import os, preflash, torch
        from concurrent.futures import ThreadPoolExecutor

        q = torch.randn(600, 4, 64)
        wide, narrow = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

        def use_threads(num_threads):
            torch.get_num_threads()
            torch.set_num_threads(num_threads)

        def started():
            before = len(os.listdir("/proc/self/task"))
            preflash.single_prefill_with_kv_cache(q, q, q)
            return len(os.listdir("/proc/self/task")) - before

        wide.submit(use_threads, 3).result()
        narrow.submit(use_threads, 1).result()
        assert narrow.submit(started).result() == 0
        assert wide.submit(started).result() == 2
    """)


def test_bits_do_not_depend_on_threads_or_other_callers():
    """Attention, packing and merging."""
    lens, options = ((1, 70, 130), (2600, 300, 130)), {"page_size": 16, "mask": MaskKind.CAUSAL}
    inputs = build(Case("mixed", *lens, 8, 2, 64, dtype=torch.float32, **options))
    x = torch.rand(1_000_003) < 0.5
    v, s = torch.randn(3000, 2, 4, 64), torch.randn(3000, 2, 4)

    def results(num_threads):
        use_threads(num_threads)
        attention = runner.run(runner.planned(inputs, backend="cpu"), inputs)
        return *attention, preflash.packbits(x), *preflash.merge_states(v, s)

    alone = results(1)

    def many(num_threads):
        return all(all(map(torch.equal, results(num_threads), alone)) for _ in range(15))

    assert all(in_threads(*(lambda n=n: many(n) for n in (1, 2, 4, 7))))


def test_threads_that_share_a_wrapper():
    """Each run has partials of its own, under more strides and windows than the wrapper keeps."""
    case = Case("shared", (3, 2), (400, 130), 2, 1, 32, mask=MaskKind.CAUSAL, fixed_split_size=64)
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    k, v = inputs.k, inputs.v
    queries = [torch.randn_like(inputs.q) for _ in range(4)]
    windows = [-1, *range(300, 312)]
    alone = [[wrapper.run(q, k, v, window_left=window) for window in windows] for q in queries]
    ready = threading.Barrier(4, timeout=60)

    def many(i):
        use_threads(1 + i % 2)
        for _ in range(3):
            if ready.wait() == 0:
                runner.plan(wrapper, inputs)
            ready.wait()
            for j in range(150):
                padding, window = (37 * i + j) % 150, (i + j) % len(windows)
                wide = inputs.q.new_empty(*inputs.q.shape[:2], 32 + 8 * padding)
                q = wide[..., :32].copy_(queries[i])
                found = wrapper.run(q, k, v, window_left=windows[window])
                if not torch.equal(found, alone[i][window]):
                    return False
        return True

    assert all(in_threads(*(lambda i=i: many(i) for i in range(4))))


def test_the_module_needs_no_interpreter_lock():
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this interpreter always has its lock")
    assert python("import sys, preflash; print(sys._is_gil_enabled())") == "False\n"


# The pool on its own: indices that sleep, so that a loaded machine changes nothing


def jobs_in_a_new_process(*jobs: dict) -> list[dict]:
    """Starts jobs 0.1 s apart, with no other helpers; returns the result and end of each."""
    code = f"""
import json, time
from concurrent.futures import ThreadPoolExecutor
from preflash_harness import threads
def run(place, job):
    time.sleep(0.1 * place)
    return threads.run(**job) | {{"end": time.monotonic()}}
with ThreadPoolExecutor({len(jobs)}) as pool:
    print(json.dumps(list(pool.map(run, range({len(jobs)}), {jobs!r}))))
"""
    return json.loads(python(code))


def test_a_new_job_gets_the_helper_of_a_running_one():
    """One helper, busy with a job of two seconds, comes to a job of a fraction of one."""
    long, short = jobs_in_a_new_process(
        {"count": 400, "num_threads": 2, "microseconds": 10_000},
        {"count": 20, "num_threads": 2, "microseconds": 10_000},
    )
    assert short["end"] < long["end"]
    assert short["most_at_once"] == long["most_at_once"] == 2
    assert len(set(short["threads"]) & set(long["threads"])) == 1


@pytest.mark.parametrize("num_jobs", [2, 5])
def test_helpers_spread_over_jobs(num_jobs):
    """Three helpers; where jobs outnumber them, each has its turn."""
    job = {"count": 800, "num_threads": 4, "microseconds": 2_000}
    for done in jobs_in_a_new_process(*[job] * num_jobs):
        assert done["most_at_once"] > 1
        helped = sorted(map(done["threads"].count, set(done["threads"])))[:-1]
        assert sum(helped) > 80


def test_a_job_has_no_more_threads_than_it_asked_for():
    ready = threading.Barrier(3, timeout=60)

    def job(num_threads):
        ready.wait()
        return threads.run(count=300, num_threads=num_threads, microseconds=1_000)

    wide, two, one = in_threads(lambda: job(8), lambda: job(2), lambda: job(1))
    assert 2 < wide["most_at_once"] <= 8
    assert two["most_at_once"] <= 2
    assert len(set(one["threads"])) == 1


def test_a_forked_process_starts_helpers_of_its_own():
    python("""
        import os
        from preflash_harness import threads

        def helped():
            return len(set(threads.run(count=100, num_threads=3, microseconds=1000)["threads"])) > 1

        assert helped()
        child = os.fork()
        if child == 0:
            os._exit(not helped())
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_a_failure_reaches_its_own_caller():
    job = {"count": 100, "num_threads": 3, "microseconds": 500}

    def fails():
        with pytest.raises(RuntimeError, match="index 50 failed"):
            threads.run(**job, fails_at=50)

    assert in_threads(fails, lambda: threads.run(**job), fails)[1]["most_at_once"] >= 1
    with pytest.raises(ValueError, match="num_threads is 0"):
        threads.run(**job | {"num_threads": 0})


def test_planning_lets_other_threads_run():
    """Four million items take the planner most of a second."""
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace())
    tokens = torch.tensor([0, 8_000_000], dtype=torch.int32)
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    def plan():
        begin = time.perf_counter()
        try:
            wrapper.plan(tokens, torch.tensor([0, 64], dtype=torch.int32), 32, 32, 64)
        finally:
            done.set()
        return begin, time.perf_counter()

    _, (begin, end) = in_threads(tick, plan)
    times = [begin, *(t for t in ticks if begin < t < end), end]
    assert max(b - a for a, b in itertools.pairwise(times)) < (end - begin) / 2
