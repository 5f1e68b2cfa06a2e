"""Thousands of page indices go to the device out of memory of their own, which plans of a wrapper
use in turns: nothing writes there while a plan or an upload needs its contents."""

import copy
import dataclasses
import functools
import threading
from concurrent import futures

import preflash
import pytest
import torch
from planned_cases import table
from preflash.testing import build, runner
from refusals import refused
from test_interrupts import MANY, MORE  # 17000 pages and more

FEW = dataclasses.replace(MANY, name="few", kv_lens=(9, 11))  # few enough for the work list


class Problem:
    def __init__(self, target, case, seed: int = 0):
        self.inputs = build(case, device=target.device, index_device="cpu", seed=seed)
        wrapper = runner.planned(self.inputs, backend=target.backend)
        runner.compare(self.inputs, *runner.run(wrapper, self.inputs)).check()
        self.results = self.run(wrapper)

    def run(self, wrapper):
        """Runs with plan()'s options, and with a window, which is a plan of its own."""
        options = ({}, {"window_left": 4000})
        return [wrapper.run(self.inputs.q, self.inputs.cache, **one) for one in options]

    def plan(self, wrapper) -> None:
        """Plans from arrays that are overwritten afterwards."""
        given = dataclasses.replace(self.inputs, indices=self.inputs.indices.clone())
        runner.plan(wrapper, given)
        given.indices.fill_(1 << 30)

    def check(self, wrapper) -> None:
        assert all(map(torch.equal, self.run(wrapper), self.results))

    def plan_and_check(self, wrapper) -> None:
        self.plan(wrapper)
        self.check(wrapper)


def make_wrapper(target):
    return runner.make_wrapper(MANY, backend=target.backend, device=target.device)


@functools.cache
def problems_of(target) -> list[Problem]:
    problems = [Problem(target, case, seed) for seed, case in enumerate((MANY, MORE, FEW, MANY))]
    # Page indices before the first request's are copied with the others, whatever their values.
    inputs, before = problems[0].inputs, torch.tensor([-5, 1 << 30, -7], dtype=torch.int32)
    inputs.indices = torch.cat([before, inputs.indices])
    inputs.kv_indptr = inputs.kv_indptr + len(before)
    return problems


@pytest.fixture
def problems(target) -> list[Problem]:
    return problems_of(target)


def test_copies_of_a_wrapper(target, problems):
    """Copies share the batch of their wrapper, plan for themselves and outlive it."""
    wrapper, copies = make_wrapper(target), []
    problems[0].plan(wrapper)
    for i in (3, 2, 3, 1):
        problems[i].plan(wrapper)
        copies.append((copy.copy(wrapper), i))
    first, i = copies[0]
    problems[i].check(first)
    for i in (1, 2, 0, 3):
        problems[i].plan_and_check(first)
        problems[1].check(wrapper)
    del wrapper
    for one, i in copies[1:]:
        problems[i].check(one)


def test_a_refused_plan_changes_nothing(target, problems):
    wrapper = make_wrapper(target)
    for name, at, value, says in (
        ("indices", 16_999, -3, "holds -3; page"),
        ("qo_indptr", 1, 90, "qo_indptr"),
    ):
        problems[0].plan(wrapper)
        inputs = build(MANY, device=target.device, index_device="cpu", seed=7)
        getattr(inputs, name)[at] = value
        for _ in range(4):
            refused(says, runner.plan, wrapper, inputs)
        problems[0].check(wrapper)


def test_any_number_of_pages(target):
    """From 16,384 indices on they have memory of their own."""
    wrapper = make_wrapper(target)
    for count in (20_000, 16_383, 16_384, 70_000, 20_000):
        pages = torch.randperm(count, dtype=torch.int32)
        arrays = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, count], [1])]
        wrapper.plan(*arrays[:2], pages, arrays[2], 2, 1, 64, 1)
        assert torch.equal(wrapper._paged_kv_indices_buf.cpu(), pages)


def test_memory_of_the_caller(target, problems):
    """The list of the old plan goes to the new memory; the next plans go there, too."""
    wrapper = make_wrapper(target)
    for i in (0, 3):
        problems[i].plan(wrapper)
    # The largest problem's size: with less, keys are split otherwise, which changes bits.
    calls = [runner.plan_arguments(problem.inputs) for problem in problems]
    sizes = [wrapper.workspace_size(*positional, **options) for positional, options in calls]
    for _ in range(2):
        wrapper.reset_workspace_buffer(
            *(runner.workspace(target.device, max(needed)) for needed in zip(*sizes, strict=True))
        )
        problems[3].check(wrapper)
        for i in (1, 3, 1, 0, 3):
            problems[i].plan_and_check(wrapper)


def test_threads(target, problems):
    """Copies with workspaces of their own upload one list at once, while others plan."""
    wrapper = make_wrapper(target)
    for i in (0, 3):
        problems[i].plan(wrapper)
    begin = threading.Barrier(4)

    def work(i):
        floats = runner.workspace(target.device)
        ints = torch.zeros(1 << 21, dtype=torch.uint8, device=target.device)
        begin.wait()
        for n in range(2):
            one = copy.copy(wrapper)
            one.reset_workspace_buffer(floats, ints)
            problems[3].check(one)
            if i % 2:
                problems[n % 2].plan_and_check(one)

    with futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, i) for i in range(4)]:
            done.result()
    problems[3].check(wrapper)


def test_prefill_with_decode(target):
    """Lists of two segments, of which either may be long."""
    decode = dataclasses.replace(MANY, qo_lens=(1, 1))
    short = dataclasses.replace(decode, kv_lens=(5, 9))
    buffer = runner.workspace(target.device)
    together = preflash.BatchPODWithPagedKVCacheWrapper(buffer, backend=target.backend)
    for seed, cases in enumerate([(MANY, decode), (MORE, decode), (FEW, decode), (MANY, short)]):
        p, d = (build(x, device=target.device, index_device="cpu", seed=seed) for x in cases)
        given = [x.clone() for inputs in (p, d) for x in (inputs.qo_indptr, *table(inputs))]
        together.plan(*given, 2, 1, 64, 1, q_data_type=MANY.dtype)
        for array in given:
            array.fill_(-1)
        got = together.run(p.q, p.cache, d.q, d.cache, causal_p=True)
        for inputs, out in zip((p, d), got, strict=True):
            runner.compare(inputs, out, None).check()
