"""Whether plans may have a pre-pass (RoPE, fp8): it rotates or dequantises once what a kernel would
rotate or dequantise on load, for every query tile."""

from __future__ import annotations

import os

from .. import _core

SWITCH = "PREFLASH_PREPASS"
_POLICIES = {
    "auto": _core.Prepass.auto,  # where they pay and fit
    "never": _core.Prepass.never,
    "always": _core.Prepass.always,
}
_given = os.environ.get(SWITCH) or "auto"


def policy() -> str:
    """What the environment says, which is read once."""
    return _given


def check_environment() -> None:
    """Raises ValueError where it holds another word."""
    if _given not in _POLICIES:
        raise ValueError(
            f"{SWITCH}={_given!r} in the environment: must be unset, or one of "
            f"{', '.join(_POLICIES)}"
        )


def applied_to(options: _core.AttentionOptions) -> _core.AttentionOptions:
    """Raises ValueError where the environment holds another word."""
    if _given == "auto":
        return options
    check_environment()
    return options.replace(prepass=_POLICIES[_given])


def without(options: _core.AttentionOptions) -> _core.AttentionOptions:
    """For runs with factors of heads, which are applied where operands are dequantised on load."""
    return options.replace(prepass=_core.Prepass.never)
