"""What tests and benchmarks share: named cases, inputs built from them, and a float64 oracle.

Everything here needs torch alone. A `case` says what to compute: `cases` lists named ones,
`random_cases` draws others. `inputs` makes the tensors (poisoned wherever no request owns them),
`oracle` computes the answer in float64, `comparison` compares a result with it, `runner` drives the
public wrappers, `timing` measures. `problems` draws random cases with everything that decides how
they are called, `fuzz` examines them, `shrinking` makes smaller ones of those that fail.
"""

from . import cases, comparison, fuzz, inputs, oracle, problems, runner, timing
from .case import Case, Garbage, KvForm, Magnitude, MaskKind, Position, Sinks
from .comparison import Report, compare, poison
from .inputs import Inputs, build
from .oracle import Expected, attend, reference

__all__ = [
    "Case",
    "Expected",
    "Garbage",
    "Inputs",
    "KvForm",
    "Magnitude",
    "MaskKind",
    "Position",
    "Report",
    "Sinks",
    "attend",
    "build",
    "cases",
    "compare",
    "comparison",
    "fuzz",
    "inputs",
    "oracle",
    "poison",
    "problems",
    "reference",
    "runner",
    "timing",
]
