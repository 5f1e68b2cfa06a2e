"""Counts the bytecodes of a call, a measure of its Python that no load of the machine changes."""

import gc
import sys


def interpreter_steps(call) -> int:
    """Returns the bytecodes that a call executes, and not those of finalizers."""
    _traced_steps(lambda: None)  # The first trace of a process sees no opcodes on Python 3.12
    return _traced_steps(call)


def _traced_steps(call) -> int:
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return steps
