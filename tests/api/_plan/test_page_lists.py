"""Page indices that are so many that they go to the device out of memory of their own, which the
plans of a wrapper take in turns: nobody writes there while a plan or an upload needs what it holds.
"""

import copy
import dataclasses
import functools
import threading

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner
from test_growth import check_steady
from test_interrupts import interrupted

# 17000 pages and more; 20 are few enough to travel in the work list.
MANY = Case("many", (2, 3), (9000, 8000), 2, 1, 64, page_size=1, mask=MaskKind.CAUSAL)
MORE = dataclasses.replace(MANY, name="more", qo_lens=(1, 4, 2), kv_lens=(20_000, 7, 20_000))
FEW = dataclasses.replace(MANY, name="few", kv_lens=(9, 11))
WINDOW = 4000


@dataclasses.dataclass
class Problem:
    """A batch whose page indices are on the host, with its results by a wrapper of its own."""

    inputs: object
    results: dict[int, torch.Tensor]  # by window_left

    @classmethod
    def of(cls, target, case: Case, seed: int = 0):
        inputs = build(case, device=target.device, index_device="cpu", seed=seed)
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
        results = {
            window: wrapper.run(inputs.q, inputs.cache, window_left=window)
            for window in (-1, WINDOW)
        }
        return cls(inputs, results)

    def plan(self, wrapper) -> None:
        """Plans from arrays that are overwritten afterwards."""
        inputs = copy.copy(self.inputs)
        inputs.indices = inputs.indices.clone()
        runner.plan(wrapper, inputs)
        inputs.indices.fill_(1 << 30)

    def check(self, wrapper) -> None:
        for window, expected in self.results.items():
            options = {} if window < 0 else {"window_left": window}
            got = wrapper.run(self.inputs.q, self.inputs.cache, **options)
            assert torch.equal(got, expected), window


def make_wrapper(target):
    return runner.make_wrapper(MANY, backend=target.backend, device=target.device)


@pytest.fixture
def problems(target) -> list[Problem]:
    return [Problem.of(target, case, seed) for seed, case in enumerate((MANY, MORE, FEW, MANY))]


def test_plans_in_turns(target, problems):
    wrapper = make_wrapper(target)
    for i in (0, 3, 0, 1, 3, 2, 0, 1, 1, 2, 3):
        problems[i].plan(wrapper)
        problems[i].check(wrapper)


def test_some_pages_belong_to_nobody(target):
    """Page indices before the first request's are copied with the others, whatever their values."""
    problem = Problem.of(target, MANY)
    inputs = problem.inputs
    before = torch.tensor([-5, 1 << 30, -7], dtype=torch.int32)
    inputs.indices = torch.cat([before, inputs.indices])
    inputs.kv_indptr = inputs.kv_indptr + len(before)
    wrapper = make_wrapper(target)
    for _ in range(4):
        problem.plan(wrapper)
        problem.check(wrapper)


def test_a_refused_plan_changes_nothing(target, problems):
    wrapper = make_wrapper(target)
    for _ in range(3):
        problems[0].plan(wrapper)
        for spoil, match in (
            (lambda i: i.indices.index_fill_(0, torch.tensor([16_999]), -3), "holds -3; page"),
            (lambda i: i.qo_indptr.index_fill_(0, torch.tensor([1]), 90), "qo_indptr"),
        ):
            inputs = build(MANY, device=target.device, index_device="cpu", seed=7)
            spoil(inputs)
            for _ in range(4):
                with pytest.raises(ValueError, match=match):
                    runner.plan(wrapper, inputs)
        problems[0].check(wrapper)


def test_copies_of_a_wrapper(target, problems):
    """Copies share the batch of their wrapper and outlive it."""
    wrapper = make_wrapper(target)
    for i in (0, 3, 0):
        problems[i].plan(wrapper)
    copies = [copy.copy(wrapper)]
    for i in (3, 1, 3, 1):
        problems[i].plan(wrapper)
        copies.append(copy.copy(wrapper))
    for one, i in zip(copies, (0, 3, 1, 3, 1), strict=True):
        problems[i].check(one)
    del wrapper, one
    for i in (1, 0, 3):
        problems[i].plan(copies[0])
        problems[i].check(copies[0])
    for one, i in zip(copies[1:], (3, 1, 3, 1), strict=True):
        problems[i].check(one)


def test_memory_of_the_caller(target, problems):
    """The list of the old plan goes to the new memory; the next plans go there, too."""
    wrapper = make_wrapper(target)
    problems[0].plan(wrapper)
    problems[3].plan(wrapper)
    for _ in range(3):
        # As much as the largest needs: with less, keys are split otherwise, which changes bits.
        sizes = []
        for problem in problems:
            positional, options = runner.plan_arguments(problem.inputs)
            sizes.append(wrapper.workspace_size(*positional, **options))
        buffers = (
            torch.zeros(max(needed) + 16, dtype=torch.uint8, device=target.device)
            for needed in zip(*sizes, strict=True)
        )
        planned = wrapper._plan
        wrapper.reset_workspace_buffer(*buffers)
        assert planned.request is wrapper._plan.request
        for i in (1, 3, 1, 0, 3):
            problems[i].plan(wrapper)
            problems[i].check(wrapper)


def test_threads(target, problems):
    """Copies with workspaces of their own upload one list at once, while others plan."""
    wrapper = make_wrapper(target)
    problems[0].plan(wrapper)
    problems[3].plan(wrapper)
    failures = []
    begin = threading.Barrier(4)

    def work(i):
        try:
            floats = runner.workspace(target.device)
            ints = torch.zeros(1 << 21, dtype=torch.uint8, device=target.device)
            begin.wait()
            for n in range(2):
                one = copy.copy(wrapper)
                one.reset_workspace_buffer(floats, ints)
                problems[3].check(one)
                if i % 2:
                    problems[n % 2].plan(one)
                    problems[n % 2].check(one)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    problems[3].check(wrapper)


def test_no_growth(target):
    """Over thousands of plans with more and fewer pages, some of them refused."""
    wrapper = make_wrapper(target)
    last = torch.ones(1, dtype=torch.int32)
    qo_indptr = torch.arange(2, dtype=torch.int32)
    counts = (17_000, 40_000, 16_384, 100, 33_000)
    lists = [torch.arange(count, dtype=torch.int32) for count in counts]
    lists[2][5] = -1
    steps = 0

    def step():
        nonlocal steps
        pages = lists[steps % len(lists)]
        steps += 1
        try:
            wrapper.plan(qo_indptr, qo_indptr * len(pages), pages, last, 2, 1, 64, 1)
        except ValueError:
            assert pages is lists[2]

    check_steady(step, 2000)


def test_interrupted_plans(target, problems):
    old, new = problems[0], problems[1]
    ends = {"old": 0, "new": 0}
    step = 0
    while True:
        wrapper = make_wrapper(target)
        for _ in range(3):
            old.plan(wrapper)
        before = wrapper._plan
        if not interrupted(functools.partial(runner.plan, wrapper, new.inputs), step):
            break
        which = "old" if wrapper._plan is before else "new"
        ends[which] += 1
        (old if which == "old" else new).check(wrapper)
        step += 23
    assert ends["old"] > 10


def test_prefill_beside_decode(target):
    """Lists of two segments, of which either may be long."""
    decode = dataclasses.replace(MANY, qo_lens=(1, 1))
    short = dataclasses.replace(decode, kv_lens=(5, 9))
    pairs = [(MANY, decode), (MORE, decode), (FEW, decode), (MANY, short)]
    buffer = runner.workspace(target.device)
    together = preflash.BatchPODWithPagedKVCacheWrapper(buffer, backend=target.backend)
    for seed, cases in enumerate(pairs * 2):
        sides = [
            build(case, device=target.device, index_device="cpu", seed=seed + n)
            for n, case in enumerate(cases)
        ]
        expected = []
        for inputs in sides:
            alone = make_wrapper(target)
            runner.plan(alone, inputs)
            expected.append(alone.run(inputs.q, inputs.cache))
        tables = [
            tensor.clone()
            for i in sides
            for tensor in (i.qo_indptr, i.kv_indptr, i.indices, i.last_page_len)
        ]
        together.plan(*tables, 2, 1, 64, 1, q_data_type=MANY.dtype)
        for table in tables:
            table.fill_(-1)
        p, d = sides
        got = together.run(p.q, p.cache, d.q, d.cache, causal_p=True)
        for inputs, out, alone in zip(sides, got, expected, strict=True):
            runner.compare(inputs, out, None).check()
            assert out.shape == alone.shape
