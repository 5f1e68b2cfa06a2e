"""Checks that torch makes a call instead of recording or differentiating it: preflash computes
forward, and at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import is_grad_enabled
from torch._C import _is_torch_function_mode_enabled as function_mode_is_active
from torch._C import _is_tracing as jit_is_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _core

# For C++: reads tensors, asks about tracing and autograd, and reports what was written.
TORCH = _core.Torch(torch.Tensor, jit_is_tracing, is_grad_enabled, torch.autograd)

Function = TypeVar("Function", bound=Callable[..., Any])

# The reason that torch.compile prints where it cannot trace one of these functions.
_WHY_EAGER = "it reads addresses of tensors and runs at once; call it outside of torch.compile"
_TAKES_REASON = "reason" in inspect.signature(torch.compiler.disable).parameters  # torch 2.7


def eager(function: Function) -> Function:
    """Keeps torch.compile out of a function and of what it calls: they run as they are written,
    inside of an operator (_torch_ops) or at a graph break.

    These functions ask for addresses, modes and storage, which dynamo would answer for its fake
    tensors. Unlike torch.compiler.disable this costs an ordinary call nothing.
    """
    function._torchdynamo_disable = True  # not inlined
    function._torchdynamo_disable_msg = _WHY_EAGER  # read by torch 2.7 and later
    dynamo = torch._C._dynamo.eval_frame
    actions = getattr(dynamo, "_FrameAction", None)
    strategy = getattr(dynamo, "_FrameExecStrategy", None)
    if actions is not None and strategy is not None:
        dynamo.set_code_exec_strategy(function.__code__, strategy(actions.SKIP, actions.SKIP))
    elif hasattr(dynamo, "skip_code"):  # torch 2.5 and before
        dynamo.skip_code(function.__code__)
    return function


def not_compiled(reason: str) -> Callable[[Function], Function]:
    """Decorates a function with torch.compiler.disable, and with the reason that torch.compile
    prints at its graph break. torch 2.4 to 2.6 print no reason."""
    options = {"reason": reason} if _TAKES_REASON else {}
    return functools.partial(torch.compiler.disable, **options)


@eager
def forward_only(*tensors: torch.Tensor, **named: torch.Tensor | None) -> None:
    """Refuses a call whose gradient or trace would miss it. Ordinary calls pay 0.1 us for it.

    What is not a tensor is left to the checks that name it.

    named: further tensors, which the message names; among them those that the call writes, because
    autograd would use their old values.
    """
    if jit_is_tracing() or function_mode_is_active() or num_dispatch_modes():
        not_traced()
    not_differentiated(*tensors)
    for name, value in named.items():
        if value is not None:
            not_differentiated(value, what=name)


def not_differentiated(*tensors: torch.Tensor, what: str = "an input") -> None:
    try:
        if is_grad_enabled():
            for value in tensors:
                if value.requires_grad:
                    raise _no_gradient(f"{what} requires grad")
        # torch.no_grad() does not switch forward-mode differentiation off.
        if forward_ad._current_level >= 0:
            for value in tensors:
                if forward_ad.unpack_dual(value).tangent is not None:
                    raise _no_gradient(f"{what} has a tangent")
    except (AttributeError, TypeError):
        pass


def written(*tensors: torch.Tensor | None) -> None:
    """Tells autograd that a launch has written into tensors of the caller's: where another
    operation saved one of them for its gradient, backward() raises, as after torch's own."""
    for value in tensors:
        if value is not None:
            torch.autograd.graph.increment_version(value)


def _no_gradient(why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{why}, and preflash computes no gradients: it is forward only. Call it under "
        "torch.inference_mode() or torch.no_grad(), or detach() its inputs"
    )


def traced() -> bool:
    """Returns True where torch records this call instead of making it (_wrappers.compile_ops):
    torch.compile, make_fx, torch.export, FakeTensorMode. torch.compile takes the first term for
    True.

    Raises NotImplementedError where a recorded transform of torch.func would differentiate the
    call: its operator would have a gradient of zeros.
    """
    if is_dynamo_compiling() or (
        (function_mode_is_active() or num_dispatch_modes() > 0) and _recorder() is not None
    ):
        if _is_differentiating():
            raise NotImplementedError(
                "a transform of torch.func differentiates this call (grad, vjp, jvp, jacrev), and "
                "preflash computes no gradients: it is forward only. Call it outside of the "
                "transform"
            )
        return True
    return False


def _is_differentiating() -> bool:
    """Returns True inside of a transform of torch.func that differentiates. torch.compile calls
    this once, while it records, and takes the answer for a constant: its guards see other
    transforms."""
    functorch = torch._C._functorch
    derivatives = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(one.key() in derivatives for one in functorch.get_interpreter_stack() or ())


_is_differentiating._dynamo_marked_constant = True  # torch.compiler.assume_constant_result


@eager
def not_traced() -> None:
    """Refuses to run where torch records operations, because it would not record this call.

    Modes that only watch (counting, logging, checkpointing) are welcome.
    """
    if jit_is_tracing():
        raise _not_traceable("torch.jit.trace")
    if not function_mode_is_active() and not num_dispatch_modes():
        return
    # Before dispatch, as torch.export traces, no dispatch mode shows; a function mode always does.
    recorder = _recorder()
    if recorder == "PROXY":
        raise _not_traceable("make_fx or torch.export")
    if recorder == "FAKE":
        raise ValueError(
            "a FakeTensorMode is active: a tensor that is made has no memory behind it; call "
            "preflash outside of it"
        )


def _not_traceable(tracer: str) -> NotImplementedError:
    return NotImplementedError(
        f"{tracer} is tracing, and the trace would hold none of this call; make it outside of what "
        "is traced. torch.compile, torch.export and make_fx record run(), the single functions "
        "and the merges"
    )


@eager
def _recorder() -> str | None:
    """Kind of the torch mode that records operations: "PROXY" or "FAKE"; None without one."""
    from torch.fx.experimental import proxy_tensor

    active, keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    # get_proxy_mode() also finds modes that record before dispatch.
    find = getattr(proxy_tensor, "get_proxy_mode", lambda: active(keys.PROXY))
    if find() is not None:
        return "PROXY"
    return None if active(keys.FAKE) is None else "FAKE"
