"""Interrupts a call before any of its bytecodes, as a signal handler may."""

import sys


class _InterruptError(BaseException):
    """Stands in for KeyboardInterrupt; only these tests raise it."""


def interrupt_at(step: int, reached: list[bool]):
    """Returns a trace function that raises before the step-th bytecode of preflash."""
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
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # the interpreter listens before it enters the call
    sys.settrace(interrupt_at(step, reached))
    try:
        call()
    except _InterruptError:
        pass
    finally:
        sys.settrace(before)
    return bool(reached)
