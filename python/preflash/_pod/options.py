"""The options of a POD run() that repeat what plan() said of the decode side."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from .._check import values as check
from .._check.arguments import Scale
from .._check.values import MODE_OF
from .._wrap.state import Planned


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
            kv_layout, MODE_OF[options.position], planned.scales.logits, options.window_left,
            options.rope_scale, options.rope_theta,
        )  # fmt: skip
        for name, value, default, now in zip(self._fields, self, _NOTHING, told, strict=True):
            if value is default:
                continue
            value = _READ[name](f"{name}_d", value)
            close = name == "sm_scale" and math.isclose(value, now, rel_tol=1e-6)
            if not close and value not in (now, default):
                raise ValueError(
                    f"{name}_d={value!r}: the decode side was planned with {now!r}; leave it out, "
                    f"or call plan() with {name}={value!r}"
                )


_NOTHING = RepeatedOptions()


# As plan() reads them.
_READ: dict[str, Callable[[str, Any], Any]] = {
    "kv_layout": lambda name, value: check.one_of(name, value, check.KV_LAYOUTS),
    "pos_encoding_mode": lambda name, value: check.one_of(name, value, check.ENCODING_MODES),
    "sm_scale": check.scale,
    "window_left": check.window_left,
    "rope_scale": check.real,
    "rope_theta": check.real,
}
