"""Several threads with a wrapper and a stream each, and children of a process that uses a GPU."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backends import on_every_backend, passes
from preflash.testing import Case, MaskKind, build, reference, runner

pytestmark = pytest.mark.gpu

CASE = Case(
    "thread", (33, 5, 0, 170), (400, 90, 7, 170), 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL
)
SPLIT = dataclasses.replace(CASE, name="split", fixed_split_size=64)
OTHERS = [
    dataclasses.replace(CASE, qo_lens=(1, 1, 1, 1), kv_lens=(900, 3, 40, 0)),
    dataclasses.replace(SPLIT, qo_lens=(9, 200, 1, 64), kv_lens=(30, 700, 0, 64)),
]


@on_every_backend
def test_four_threads_on_four_streams(backend):
    """Each plans and runs batch after batch; nothing of one reaches another."""

    def work(seed: int) -> list:
        results = []
        with torch.cuda.stream(torch.cuda.Stream()):
            wrapper = runner.make_wrapper(CASE, backend=backend, device="cuda")
            for i in range(9):
                inputs = made[(seed + i) % len(made)]
                runner.plan(wrapper, inputs)
                results.append((inputs, *runner.run(wrapper, inputs)))
            torch.cuda.current_stream().synchronize()
        return results

    cases = (CASE, SPLIT, *OTHERS)
    made = [build(case, device="cuda", index_device="cpu", seed=i) for i, case in enumerate(cases)]
    expected = [reference(inputs) for inputs in made]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            for inputs, out, lse in results:
                which = next(i for i, other in enumerate(made) if other is inputs)
                runner.compare(inputs, out, lse, expected=expected[which]).check()


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
