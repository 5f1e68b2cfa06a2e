"""A plan() that does not come to its end leaves the wrapper as it was, whole."""

import copy
import dataclasses
import functools
import gc
import pickle
import sys
import weakref

import pytest
import torch
from preflash._device import backends
from preflash._plan import pipeline
from preflash.testing import Case, MaskKind, build, runner

OLD = Case("old", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
# More requests and more tiles, so that its work list over the old one's state leaves the buffer.
NEW = Case("new", (64,) * 40 + (300,), (200,) * 40 + (900,), 4, 2, 64, page_size=16,
           mask=MaskKind.CAUSAL)  # fmt: skip


class _InterruptError(BaseException):
    """Stands in for KeyboardInterrupt; only these tests raise it."""


def interrupt_at(step: int, reached: list[bool]):
    """A trace function that raises before the step-th bytecode of our package, and notes it."""
    left = step

    def trace(frame, event, argument):
        nonlocal left
        if "preflash" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            if left <= 0:
                reached.append(True)
                raise _InterruptError
            left -= 1
        return trace

    return trace


def interrupted(call, step: int) -> bool:
    """Runs the call; true if it reached its step-th bytecode, where it was interrupted. The
    interpreter drops what is raised in a generator that it closes: then the call goes on."""
    reached: list[bool] = []
    sys._getframe().f_trace_opcodes = True  # the interpreter listens before it enters the call
    sys.settrace(interrupt_at(step, reached))
    try:
        call()
    except _InterruptError:
        pass
    finally:
        sys.settrace(None)
    return bool(reached)


def results(wrapper, inputs):
    out, lse = runner.run(wrapper, inputs)
    return out.clone(), lse.clone()


@pytest.mark.parametrize("given_int_buffer", [False, True], ids=["own", "given"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_plan_interrupted_anywhere(target, page_size, given_int_buffer):
    old_case, new_case = (
        dataclasses.replace(case, page_size=page_size, mask=MaskKind.CAUSAL) for case in (OLD, NEW)
    )
    old, new = (build(case, device=target.device) for case in (old_case, new_case))
    buffer = runner.workspace(target.device)

    def planned():
        wrapper = runner.make_wrapper(
            old_case, backend=target.backend, device=target.device, buffer=buffer
        )
        if given_int_buffer:
            ints = torch.zeros(1 << 20, dtype=torch.uint8, device=target.device)
            wrapper.reset_workspace_buffer(buffer, ints)
        runner.plan(wrapper, old)
        return wrapper

    expected_old = results(planned(), old)
    wrapper = planned()
    runner.plan(wrapper, new)
    expected_new = results(wrapper, new)
    ends = {"old": 0, "new": 0}
    step = 0
    while True:
        wrapper = planned()
        before = wrapper._plan
        if not interrupted(functools.partial(runner.plan, wrapper, new), step):
            break
        which, inputs, expected = ("old", old, expected_old) if wrapper._plan is before else (
            "new", new, expected_new)  # fmt: skip
        ends[which] += 1
        got = results(wrapper, inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (step, which)
        assert wrapper._window_left == -1
        step += 7 if step > 40 else 1  # every bytecode takes minutes
    assert ends["old"] > 20


def test_reset_and_forward_interrupted_anywhere(target):
    case = dataclasses.replace(OLD, page_size=0)
    inputs = build(case, device=target.device)

    def planned():
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        return wrapper

    expected = results(planned(), inputs)
    ints = torch.zeros(1 << 20, dtype=torch.uint8, device=target.device)

    def reset(wrapper):
        wrapper.reset_workspace_buffer(runner.workspace(target.device), ints)

    def forward(wrapper):
        wrapper.forward(inputs.q, inputs.k, inputs.v, causal=True, window_left=3)

    for call in (reset, forward):
        step = 0
        while True:
            wrapper = planned()
            if not interrupted(functools.partial(call, wrapper), step):
                break
            got = results(wrapper, inputs)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (call, step)
            step += 9
        assert step > 100


@pytest.mark.parametrize("runs_before", [0, 2])
@pytest.mark.parametrize("page_size", [0, 16])
def test_plans_during_a_run(monkeypatch, page_size, runs_before):
    """A plan made during a run, as by a signal handler or another thread, leaves the run on the
    plan that it began with."""
    many = dataclasses.replace(NEW, qo_lens=(3,) * 20, kv_lens=(20,) * 20)
    old, new = (
        build(dataclasses.replace(case, page_size=page_size, mask=MaskKind.CAUSAL))
        for case in (OLD, many)
    )
    handlers = []

    def num_threads():
        """Runs the handlers; a launch calls this when it begins."""
        while handlers:
            handlers.pop()()
        return 2

    monkeypatch.setattr(backends.CpuBackend, "num_threads", staticmethod(num_threads))
    wrapper = runner.make_wrapper(old.case, backend="cpu")
    tensors = (old.q, (old.k, old.v)) if page_size else (old.q, old.k, old.v)
    for _ in range(2):
        runner.plan(wrapper, new)
        runner.plan(wrapper, old)
        for _ in range(runs_before):
            wrapper.run(*tensors)
        handlers[:] = [lambda: runner.plan(wrapper, new)] * 3
        runner.compare(old, wrapper.run(*tensors), None).check()
        runner.compare(new, *results(wrapper, new)).check()


def test_an_upload_that_fails_changes_nothing(target, monkeypatch):
    inputs = build(OLD, device=target.device)
    other = build(NEW, device=target.device)
    wrapper = runner.make_wrapper(OLD, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    expected = results(wrapper, inputs)
    shown = repr(wrapper)

    def fail(*args, **options):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(pipeline, "upload", fail)
    new_float = runner.workspace(target.device, 1 << 20)
    ints = torch.zeros(1 << 20, dtype=torch.uint8, device=target.device)
    for call in (
        lambda: runner.plan(wrapper, other, sm_scale=0.25),
        lambda: wrapper.reset_workspace_buffer(new_float, ints),
        lambda: wrapper.run(inputs.q, inputs.cache, window_left=3),
    ):
        with pytest.raises(RuntimeError, match="no pinned memory"):
            call()
        got = results(wrapper, inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert repr(wrapper) == shown
    monkeypatch.undo()
    runner.plan(wrapper, other)
    runner.compare(other, *runner.run(wrapper, other)).check()


def test_a_copy_plans_for_itself(target):
    inputs, other = build(OLD, device=target.device), build(NEW, device=target.device)
    wrapper = runner.make_wrapper(OLD, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    expected = results(wrapper, inputs)
    twin = copy.copy(wrapper)
    assert all(torch.equal(a, b) for a, b in zip(results(twin, inputs), expected, strict=True))
    for _ in range(3):
        runner.plan(twin, other)
        runner.compare(other, *runner.run(twin, other)).check()
        assert all(
            torch.equal(a, b) for a, b in zip(results(wrapper, inputs), expected, strict=True)
        )
    runner.plan(wrapper, other)
    runner.plan(wrapper, inputs)
    runner.compare(other, *runner.run(twin, other)).check()


def test_a_plan_that_was_copied_ends_with_its_copies(target):
    inputs = build(OLD, device=target.device)
    wrapper = runner.make_wrapper(OLD, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    planned = weakref.ref(wrapper._plan.primary)
    twin = copy.copy(wrapper)
    runner.plan(wrapper, inputs)
    gc.collect()
    assert planned() is not None
    runner.compare(inputs, *runner.run(twin, inputs)).check()
    runner.plan(twin, inputs)
    gc.collect()
    assert planned() is None


def test_copies_that_cannot_be_are_refused(target):
    wrapper = runner.make_wrapper(OLD, backend=target.backend, device=target.device)
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="construct another wrapper"):
            call(wrapper)
    ints = torch.zeros(1 << 16, dtype=torch.uint8, device=target.device)
    wrapper.reset_workspace_buffer(runner.workspace(target.device), ints)
    with pytest.raises(TypeError, match="int_workspace_buffer"):
        copy.copy(wrapper)
