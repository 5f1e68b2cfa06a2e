"""Compares a result with the float64 oracle, with bounds derived from the number formats.

The model: float32 accumulation, probabilities p rounded once to the matrix format, the output
rounded once. With unit roundoffs u_o (output format), u_p (format of p in P @ V) and e = 2^-24
(float32):

* A logit is a float32 sum of products and at most three float32 multiplications: its absolute
  error is at most d = `logit_rounding` * e * X, X = |sm_scale| |q| |k| (tensor cores truncate, 16
  terms a step: 32 covers head_dim 256, and `logit_roundings()` what is longer). A soft cap c adds
  8 e c for its tanh, a bias of at most b 3 e b: its slope, its product and the sum are rounded.
  Where a GPU's own tanh caps (`HARDWARE_TANH_ERROR`), d has that part of min(X, c), too.
* Operands that a kernel rotates (RoPE) it rounds to the format of its products, u_r. The error of a
  logit adds up from independent ones of its products: t = sqrt(2) u_r |sm_scale| sqrt(sum_d
  (q_d k_d)^2). It is 0 where operands are multiplied as they were stored, or in float32.
* p_j carries a relative error of u_p, t and 2 d + 2^-19 (exponential, running rescale). A part of
  it that all j share changes the output by at most its size times |o|; the rest is independent from
  j to j and adds up to its size times N = sqrt(sum_j (p_j v_j)^2). Rounding errors have a standard
  deviation of 0.42 units, so 3 u_p N is more than 7 deviations: no element of hundreds of millions
  reaches it by chance.
* Numbers under the float16 normal range have an absolute error of 2^-25 instead, outputs under that
  of e4m3 one of 2^-10; an e4m3 output beyond 448 is 448.

Products of 8 bits (P in e4m3, Hopper) lose more. P of a row's largest weight is 4 at least, and
numbers of e4m3 under 2^-6 have an absolute error of 2^-10, under that all of it:
D = sum_j min(p_j, 2^-12 max p) |v_j| in the output. The tensor core aligns 32
products and the sum so far to the largest of them and cuts off what lies 13 bits below its leading
one:
* a logit has D/32 such steps of 33 terms, each of them off by less than g = 2^-13 B, B =
  `product_bound`; uniform errors have a standard deviation of 0.58 g, so 7 of these are
  4 sqrt(33 D/32) g <= 46 * 2^-13 B up to head_dim 128, which d has on top;
* O has 24 such steps before it is added up in float32 (768 keys), of which the sums stay below
  |o| + 4 N: A = 4 sqrt(33 ceil(S / 32)) 2^-13 (|o| + 4 N). All of one sign they are 3.3 % of |o|,
  and of its row sums, which the same products make: the quotient is off by 3.3 % at most.

Per element:  |error| <= (u_o + r) |o| + 3 r N + 2^-25 (1 + sqrt(S) max|v|),
r = u_p + t + 2 d + 2^-19; of products of 8 bits D + A + 0.033 |o| more.

Over a tensor: the same with 0.6 u for u and quadratic sums, which is what rounding to nearest
leaves (0.42 each) with a margin for short tensors; it sees a wrong scale of one rounding unit.

LSE (base 2):  |error| <= 1.5 (2 d + 3 t) + 2^-13 + 4 e |lse|: the exponential's 2^-19, S additions
in float32 and the logarithm stay far below 2^-13 = 1.2e-4 together.

NaN, +Inf and -Inf must stand exactly where the oracle has them; a fully masked row is exactly zero.
"""

from __future__ import annotations

import dataclasses
import math
import os

import torch

from .oracle import LOG2_E, Expected

FLOAT32_ROUNDOFF = 2.0**-24
LSE_SLACK = 2.0**-13
# Errors of e4m3 products: bits that the tensor core keeps, loss of a logit, of a one-sign sum.
PRODUCT_GRID = 2.0**-13
PRODUCT_ERRORS = 46.0
PRODUCT_BIAS = 0.033
EXP_ERROR = 2.0**-19
# Relative, of tanh.approx.f32 (PTX ISA, tanh).
HARDWARE_TANH_ERROR = 2.0**-10.987


def capped_by_hardware() -> bool:
    """True if fa3 caps logits by the GPU's own tanh (docs/guide.md, Scale, soft cap, LSE)."""
    return os.environ.get("PREFLASH_SOFT_CAP", "hardware") == "hardware"


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest: 2^-8 for bfloat16, 2^-11 for float16."""
    return torch.finfo(dtype).eps / 2


def logit_roundings(head_dim_qk: int) -> float:
    """The float32 roundings of a logit: of two to a step of 16 terms, and of 16 steps at least."""
    return 2.0 * max(head_dim_qk / 16, 16)


@dataclasses.dataclass
class Report:
    """Errors found by a comparison. `failures` is empty when the result is right."""

    max_abs_error: float = 0.0
    rel_frobenius: float = 0.0
    worst_ratio: float = 0.0  # largest |error| / bound over the elements
    frobenius_ratio: float = 0.0
    max_lse_error: float = 0.0
    lse_ratio: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def worst(self) -> float:
        """The largest error as a part of its bound."""
        return max(self.worst_ratio, self.frobenius_ratio, self.lse_ratio)

    def __str__(self) -> str:
        numbers = (
            f"max abs error {self.max_abs_error:.3g} ({self.worst_ratio:.2f} of its bound), "
            f"relative Frobenius {self.rel_frobenius:.3g} ({self.frobenius_ratio:.2f}), "
            f"LSE error {self.max_lse_error:.3g} ({self.lse_ratio:.2f})"
        )
        return numbers if self.ok else "; ".join(self.failures) + f" [{numbers}]"

    def check(self) -> None:
        if not self.ok:
            raise AssertionError(str(self))


def poison(shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of NaN, to be handed out as an output buffer: what is not written stays visible."""
    return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)


_KINDS = ("finite", "NaN", "+Inf", "-Inf")


def _kind(t: torch.Tensor) -> torch.Tensor:
    """The place in _KINDS."""
    return t.isnan() + 2 * t.isposinf().byte() + 3 * t.isneginf().byte()


def elements(
    report: Report, name: str, got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The errors, 0 where either is not finite, and the largest in units of its bound. Describes
    what is of the wrong kind or outside its bound with its first or worst place."""
    kind, wanted = _kind(got), _kind(expected)
    wrong = kind != wanted
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        report.failures.append(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values are of the wrong kind, "
            f"first at {place}: {_KINDS[kind[place]]} instead of {_KINDS[wanted[place]]}"
        )
    error = (got.double() - expected).masked_fill((kind + wanted) != 0, 0.0)
    ratio = (error.abs() / bound).masked_fill((kind + wanted) != 0, 0.0)
    worst = float(ratio.max())
    if worst > 1:
        place = tuple(int(i) for i in (ratio == worst).nonzero()[0])
        report.failures.append(
            f"{name}: {int((ratio > 1).sum())} of {ratio.numel()} values are outside their bound, "
            f"worst at {place}: {float(got[place]):.8g} instead of {float(expected[place]):.8g} "
            f"(bound {float(bound[place]):.3g})"
        )
    return error, worst


def compare(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: Expected,
    *,
    p_dtype: torch.dtype | None = None,
    soft_cap: float = 0.0,
    logit_rounding: float = 32.0,
    rotated_dtype: torch.dtype | None = None,
    lse_base: str = "log2",
    equal_values: bool = False,
    hardware_cap: bool | None = None,
) -> Report:
    """`out` [rows, heads, dim] and `lse` [rows, heads] against the oracle's answer for those rows.

    `p_dtype` is the format of the probabilities in P @ V; the output's by default. `logit_rounding`
    counts the float32 roundings of a logit; fewer for inputs whose products and sums are exact.
    `rotated_dtype` is what RoPE's rotated operands are rounded to; None: they are not.
    `hardware_cap`: whether a GPU's own tanh caps logits; where `out` is on one, if it may.
    `equal_values`: the output is made of few values, 8-bit ones times one weight each. Equal ones
    round equally, so that over a tensor u stands for itself.
    """
    report = Report()
    pairs = [("out", out, expected.out), ("lse", lse, expected.lse)]
    for name, got, wanted in pairs[: 1 if lse is None else 2]:
        if got.shape != wanted.shape:
            shapes = f"shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
            report.failures.append(f"{name}: {shapes}")
    if lse is not None and lse.dtype != torch.float32:
        report.failures.append(f"lse: dtype {lse.dtype}, expected torch.float32")
    if report.failures or out.numel() == 0:
        return report

    # d, t and r of the module's formulas, per row and head.
    d = FLOAT32_ROUNDOFF * (
        logit_rounding * expected.logit_bound + 8 * soft_cap + 3 * expected.bias_bound
    )
    if hardware_cap is None:
        hardware_cap = out.is_cuda and capped_by_hardware()
    if soft_cap > 0 and hardware_cap:
        d = d + HARDWARE_TANH_ERROR * expected.logit_bound.clamp(max=soft_cap)
    p_dtype = p_dtype or out.dtype
    lost = (0.0, 0.0)
    if p_dtype.itemsize == 1:
        d = d + PRODUCT_ERRORS * PRODUCT_GRID * expected.product_bound
        lost = _lost_by_products(expected)
    u_rotated = 0.0 if rotated_dtype is None else unit_roundoff(rotated_dtype)
    t = math.sqrt(2) * u_rotated * expected.logit_spread
    r = unit_roundoff(p_dtype) + t + 2 * d + EXP_ERROR
    _compare_out(report, out, expected, r, 1.0 if equal_values else 0.6, lost)
    if lse is not None:
        unit = 1.0 if lse_base == "log2" else 1.0 / LOG2_E
        size = expected.lse.abs().nan_to_num(posinf=0.0)
        bound = LOG2_E * (2 * d + 3 * t) + LSE_SLACK + 4 * FLOAT32_ROUNDOFF * size
        errors, report.lse_ratio = elements(report, "lse", lse, expected.lse * unit, bound * unit)
        report.max_lse_error = float(errors.abs().max())
    return report


def _lost_by_products(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """D + A + 0.033 |o| of the module's formulas, of an element, where A is seven deviations, and
    over a tensor."""
    size, n = expected.out.abs(), expected.spread
    terms = 33 * math.ceil(max(expected.longest_kv, 1) / 32)
    added = 4 * math.sqrt(terms) * PRODUCT_GRID * (size + 4 * n)
    systematic = expected.small + PRODUCT_BIAS * size
    return systematic + added, systematic + added / 7


def _compare_out(
    report: Report, out: torch.Tensor, expected: Expected, r: torch.Tensor, typical: float, lost
) -> None:
    """typical: rounding errors over a tensor as a part of the largest; lost: by products."""
    u_out, (lost_most, lost_typical) = unit_roundoff(out.dtype), lost
    wanted, size, n, r = expected.out, expected.out.abs(), expected.spread, r[..., None]
    tiny = 2.0**-25 * (1 + math.sqrt(max(expected.longest_kv, 1)) * expected.value_bound)
    if out.dtype.itemsize == 1:
        limits = torch.finfo(out.dtype)
        wanted, out = wanted.clamp(limits.min, limits.max), out.double()
        tiny += limits.smallest_normal * limits.eps / 2
    bound = (u_out + r) * size + 3 * r * n + tiny + lost_most
    if bool((out[expected.empty] != 0).any()):
        report.failures.append("out: a row that keeps no key is not exactly zero")
    error, report.worst_ratio = elements(report, "out", out, wanted, bound)
    report.max_abs_error = float(error.abs().max())
    variance = (u_out * size).square() + (r * size).square() + (r * n).square() + lost_typical**2
    allowed = typical * float(variance.nan_to_num().sum().sqrt()) + tiny * math.sqrt(error.numel())
    norm = float(expected.out.nan_to_num(posinf=0.0, neginf=0.0).norm())
    total = float(error.norm())
    report.rel_frobenius = total / norm if norm > 0 else total
    report.frobenius_ratio = total / allowed
    if report.frobenius_ratio > 1:
        report.failures.append(
            f"out: Frobenius error {total:.3g} of {norm:.3g} exceeds {allowed:.3g}"
        )
