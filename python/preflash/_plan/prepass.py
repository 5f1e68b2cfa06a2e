"""Policy for the pre-pass of plans (RoPE, fp8): it rotates or dequantises once what a kernel would
rotate or dequantise on load, for every query tile."""

from __future__ import annotations

import os

from .. import _core

SWITCH = "PREFLASH_PREPASS"
_POLICIES = {
    "auto": _core.Prepass.auto,  # where it is faster and fits
    "never": _core.Prepass.never,
    "always": _core.Prepass.always,
}
_given = os.environ.get(SWITCH) or "auto"


def policy() -> str:
    """PREFLASH_PREPASS of the environment, read once at import; "auto" if unset."""
    return _given


def check_environment() -> None:
    """Raises ValueError if PREFLASH_PREPASS names no policy."""
    if _given not in _POLICIES:
        raise ValueError(
            f"{SWITCH}={_given!r} in the environment: must be unset, or one of "
            f"{', '.join(_POLICIES)}"
        )


def applied_to(options: _core.AttentionOptions) -> _core.AttentionOptions:
    """Returns the options with PREFLASH_PREPASS's policy. Raises ValueError if it names none."""
    if _given == "auto":
        return options
    check_environment()
    return options.replace(prepass=_POLICIES[_given])


def without(options: _core.AttentionOptions) -> _core.AttentionOptions:
    """Returns the options without a pre-pass, for runs with per-head factors: kernels apply those
    where they dequantise on load."""
    return options.replace(prepass=_core.Prepass.never)
