"""A plan() that is interrupted leaves the wrapper with the old plan or the new one, whole."""

import collections
import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from interrupts import interrupted
from planned_cases import planned, tensors
from preflash._device import backends
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused

OLD = Case("old", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
# More requests and more tiles, so that the old plan's buffer is too small for its work list.
NEW = dataclasses.replace(OLD, qo_lens=(64,) * 40 + (300,), kv_lens=(200,) * 40 + (900,))
RAGGED = (dataclasses.replace(OLD, page_size=0), dataclasses.replace(NEW, page_size=0))
SHORT = dataclasses.replace(OLD, qo_lens=(3,) * 20, kv_lens=(20,) * 20)
# Page indices so many that they have memory of their own; see test_page_lists.py.
MANY = Case("many", (2, 3), (9000, 8000), 2, 1, 64, page_size=1, mask=MaskKind.CAUSAL)
MORE = dataclasses.replace(MANY, qo_lens=(1, 4, 2), kv_lens=(20_000, 7, 20_000))


def results(wrapper, inputs):
    return tuple(result.clone() for result in runner.run(wrapper, inputs))


def check_equal(wrapper, inputs, expected) -> None:
    assert all(map(torch.equal, results(wrapper, inputs), expected))


def ints(target, size: int = 1 << 20):
    return torch.zeros(size, dtype=torch.uint8, device=target.device)


@pytest.mark.parametrize(
    ("cases", "given_int_buffer", "plans_before"),
    [(RAGGED, False, 1), (RAGGED, True, 1), ((OLD, NEW), False, 1), ((OLD, NEW), True, 1),
     ((MANY, MORE), False, 3)],
    ids=["ragged-own", "ragged-given", "paged-own", "paged-given", "many_pages"],
)  # fmt: skip
def test_plan_interrupted_anywhere(target, cases, given_int_buffer, plans_before):
    where = "cpu" if cases[0] is MANY else target.device
    old, new = (build(case, device=target.device, index_device=where) for case in cases)
    buffer = runner.workspace(target.device)
    # Unlike those of the plan before: Python plans. A plan that C++ makes is one bytecode.
    options = {} if cases[0] is MANY else {"non_blocking": True}

    def made():
        wrapper = runner.make_wrapper(old.case, backend=target.backend, buffer=buffer)
        if given_int_buffer:
            wrapper.reset_workspace_buffer(buffer, ints(target))
        for _ in range(plans_before):
            runner.plan(wrapper, old)
        return wrapper

    wrapper = made()
    expected, inputs = {}, {old.case.batch_size: old, new.case.batch_size: new}
    for size, one in inputs.items():
        runner.plan(wrapper, one)
        expected[size] = results(wrapper, one)
    ends, step, wrapper = collections.Counter(), 0, made()
    while interrupted(functools.partial(runner.plan, wrapper, new, **options), step):
        size = wrapper._batch_size
        ends[size] += 1
        check_equal(wrapper, inputs[size], expected[size])
        assert wrapper._window_left == -1
        # Each bytecode would take minutes.
        step += 23 if plans_before > 1 else 7 if step > 40 else 1
        wrapper = made()
    assert ends[old.case.batch_size] > (10 if plans_before > 1 else 20)


@pytest.mark.parametrize("name", ["reset_workspace_buffer", "forward"])
def test_other_calls_interrupted_anywhere(target, name):
    inputs, wrapper = planned(RAGGED[0], target)
    expected, memory, step = results(wrapper, inputs), ints(target), 0
    arguments, options = (runner.workspace(target.device), memory), {}
    if name == "forward":
        arguments = (inputs.q, inputs.k, inputs.v)
        options = {"causal": True, "window_left": 3}
    while True:
        wrapper = runner.planned(inputs, backend=target.backend, size=1 << 20)
        if not interrupted(functools.partial(getattr(wrapper, name), *arguments, **options), step):
            break
        check_equal(wrapper, inputs, expected)
        step += 9
    assert step > 100


@pytest.mark.parametrize("page_size", [0, 16])
def test_plans_during_a_run(monkeypatch, page_size):
    """A plan made during a run, as by a signal handler or another thread, leaves the run on the
    plan that it began with."""
    old, new = (build(dataclasses.replace(case, page_size=page_size)) for case in (OLD, SHORT))
    handlers = []

    def num_threads():
        while handlers:
            handlers.pop()()
        return 2

    monkeypatch.setattr(backends.CpuBackend, "num_threads", staticmethod(num_threads))
    wrapper = runner.make_wrapper(old.case, backend="cpu")
    for runs_before in (0, 0, 2, 2):
        runner.plan(wrapper, new)
        runner.plan(wrapper, old)
        for _ in range(runs_before):
            wrapper.run(*tensors(old))
        handlers[:] = [lambda: runner.plan(wrapper, new)] * 3
        runner.compare(old, wrapper.run(*tensors(old)), None).check()
        runner.compare(new, *results(wrapper, new)).check()


def test_copies_that_cannot_be_are_refused(target):
    wrapper = runner.make_wrapper(OLD, backend=target.backend, device=target.device)
    for call in (copy.deepcopy, pickle.dumps):
        refused("construct another wrapper", call, wrapper, error=TypeError)
    wrapper.reset_workspace_buffer(runner.workspace(target.device), ints(target, 1 << 16))
    refused("int_workspace_buffer", copy.copy, wrapper, error=TypeError)
