"""Shared by the self-test, the benchmarks and the tests, with torch alone: `case` defines what to
compute, `inputs` makes the tensors, `oracle` computes the answer in float64, `comparison` compares
a result with it, `runner` drives the public wrappers, `timing` measures."""

from . import comparison, inputs, oracle, runner, timing
from .case import Case, Garbage, KvForm, Magnitude, MaskKind, Position, Sinks
from .comparison import Report, compare, poison
from .inputs import Inputs, build
from .oracle import Expected, attend, reference

__all__ = [
    "Case", "Expected", "Garbage", "Inputs", "KvForm", "Magnitude", "MaskKind", "Position",
    "Report", "Sinks", "attend", "build", "compare", "comparison", "inputs", "oracle", "poison",
    "reference", "runner", "timing",
]  # fmt: skip
