"""The options of a POD run() that repeat what plan() said of the decode side."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from .._check import values as check
from .._check.arguments import Scale
from .._wrap.state import Planned

_MODE_OF = {position: mode for mode, position in check.POSITIONS.items()}


class RepeatedOptions(NamedTuple):
    """As they were given. A default says nothing: it cannot be told from an argument that was left
    out."""

    kv_layout: str = "NHD"
    pos_encoding_mode: str = "NONE"
    sm_scale: Scale = None
    window_left: int = -1
    rope_scale: float | None = None
    rope_theta: float | None = None

    @property
    def anything(self) -> bool:
        """Whether anything is said. By identity: a tensor is equal to nothing as a whole."""
        return any(map(operator.is_not, self, _NOTHING))

    def check_against(self, planned: Planned, kv_layout: str) -> None:
        """Raises ValueError where one of them contradicts what was planned.

        kv_layout: the decode side's.
        """
        options = planned.asked.request.options
        told = RepeatedOptions(
            kv_layout,
            _MODE_OF[options.position],
            planned.scales.logits,
            options.window_left,
            options.rope_scale,
            options.rope_theta,
        )
        for name, value, default, now in zip(self._fields, self, _NOTHING, told, strict=True):
            if value is default:
                continue
            value = _read(f"{name}_d", value)
            same = value == now
            if not same and name == "sm_scale":
                same = math.isclose(value, now, rel_tol=1e-6)
            if not same and value != default:
                raise ValueError(
                    f"{name}_d={value!r}: the decode side was planned with {now!r}; leave it out, "
                    f"or call plan() with {name}={value!r}"
                )


_NOTHING = RepeatedOptions()


def _read(name: str, value: Any) -> Any:
    """As plan() reads it."""
    if name == "sm_scale_d":
        return check.scale(name, value)
    if name == "window_left_d":
        return check.window_left(value, name)
    if name in ("rope_scale_d", "rope_theta_d"):
        return check.real(name, value)
    allowed = check.KV_LAYOUTS if name == "kv_layout_d" else check.ENCODING_MODES
    return check.one_of(name, value, allowed)
