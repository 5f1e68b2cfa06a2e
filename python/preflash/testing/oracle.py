"""Attention in float64: the one definition of right that every backend is compared with.

For row i and key j of a request with L queries and S keys, delta = S - L:
logit = sm_scale * dot(q_i, k_j), with RoPE after both are rotated by their positions delta + i and
j, soft-capped to c * tanh(logit / c), plus slope * (j - i) with
ALiBi, and -inf where the mask drops the key. Causal keeps j <= i + delta; window_left w >= 0 keeps
j >= i + delta - w; chunks of c keep j >= floor((i + delta) / c) * c; a custom mask replaces causal
and is ANDed with the window. A sink is one more logit of every row of its head, in the denominator
and the LSE alone. A row that keeps no key has output 0 and LSE -inf, or its sink.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

LOG2_E = math.log2(math.e)


@dataclasses.dataclass
class Expected:
    """The answer in float64, and what a bound on rounding errors needs to know."""

    out: torch.Tensor  # [rows, num_qo_heads, head_dim_vo]
    lse: torch.Tensor  # [rows, num_qo_heads], base 2, -inf where nothing is kept
    # Like lse, without sinks: the largest kept logit, and the sum of exp(logit - largest).
    largest: torch.Tensor
    total: torch.Tensor
    empty: torch.Tensor  # like lse, bool: whether the row keeps no key
    spread: torch.Tensor  # like out: sqrt(sum_j (p_j v_j)^2), how independent errors of p_j add up
    logit_bound: torch.Tensor  # like lse: |sm_scale| * |q_i| * max_j |k_j|, no logit exceeds it
    # Like lse: |sm_scale| max_j sqrt(sum_d (q_id k_jd)^2); 0 without RoPE.
    logit_spread: torch.Tensor
    bias_bound: torch.Tensor  # like lse: the largest |bias| of a kept key
    # Errors of 8-bit products (comparison.py), for queries of 8 bits, else 0.
    # Like lse: |sm_scale| times the largest of the products q_d k_d and their sums over 32, 64, ...
    product_bound: torch.Tensor
    small: torch.Tensor  # like out: sum_j min(p_j, 2^-12 max_j p_j) |v_j|
    value_bound: float  # max |v|
    longest_kv: int

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
        """The same with `function` of every tensor: a selection of rows, a move to a device."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(self, **{k: function(v) for k, v in tensors.items()})


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding as Llama has it: dimension d turns with dimension d + D / 2."""

    scale: float = 1.0
    theta: float = 1e4

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float64 x [..., n, D] of n positions, every row turned by the angles of its own."""
        half = x.shape[-1] // 2
        powers = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = positions.double()[:, None] / self.scale * self.theta**-powers
        first, second = x[..., :half], x[..., half:]
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


@dataclasses.dataclass(frozen=True)
class HeadScales:
    """A factor of each head of q, k and v; None: 1."""

    q: torch.Tensor | None = None  # [num_qo_heads]
    k: torch.Tensor | None = None  # [num_kv_heads]
    v: torch.Tensor | None = None  # [num_kv_heads]


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float64 [tokens, heads, dim]."""
    return x.double() if scale is None else x.double() * scale.to(x.device).double()[:, None]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Steps between q.k and the softmax, and those applied to the output."""

    sm_scale: float
    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    out_scale: float = 1.0
    slopes: torch.Tensor | None = None  # [num_qo_heads], ALiBi
    rope: Rope | None = None
    sinks: torch.Tensor | None = None  # [num_qo_heads], natural logarithms
    scales: HeadScales = HeadScales()
    chunk_size: int = 0
    bias_from_key_0: bool = False  # ALiBi's distances count from there, not from the row
    quantizes_q: bool = False  # queries become e4m3: quantized_rows()


def quantized_rows(q: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as e4m3 holds them times a power of two of each row, which brings its largest
    element into (224, 448]; in float64. A row with an infinite element is NaN."""
    fraction, exponent = torch.frexp(q.double().abs().amax(-1, keepdim=True))
    exponent = (9 - exponent - (fraction > 0.875).to(exponent.dtype)).clamp(max=126)
    scaled = torch.ldexp(q.double(), exponent)
    scaled = scaled.masked_fill(q.isinf().any(-1, keepdim=True), math.nan)
    return torch.ldexp(scaled.float().to(torch.float8_e4m3fn).double(), -exponent)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Float64 [num_heads], as Press, Smith and Lewis have them (arXiv 2108.12409)."""
    n = 1 << (num_heads.bit_length() - 1)
    powers = [-8 * (i + 1) / n for i in range(n)]
    powers += [-4 * (2 * i + 1) / n for i in range(num_heads - n)]
    return torch.tensor([2.0**power for power in powers], dtype=torch.float64, device="cpu")


def kept(
    pipeline: Pipeline,
    qo_len: int,
    kv_len: int,
    custom: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The mask [rows, kv_len] as bool; `custom` is [qo_len, kv_len], True or non-zero keeps."""
    rows = torch.arange(qo_len, device=device) if rows is None else rows.to(device)
    diagonal = rows[:, None] + (kv_len - qo_len)
    keys = torch.arange(kv_len, device=device)
    keep = keys >= _first_keys(pipeline, diagonal)
    if custom is not None:
        keep &= custom.to(device)[rows].bool()
    elif pipeline.causal:
        keep &= keys <= diagonal
    return keep


def _first_keys(pipeline: Pipeline, diagonal: torch.Tensor) -> torch.Tensor:
    """First key that window and chunk keep, for rows whose last causal keys are `diagonal`."""
    first = torch.zeros_like(diagonal)
    if pipeline.window_left >= 0:
        first = first.maximum(diagonal - pipeline.window_left)
    if pipeline.chunk_size > 0:
        first = first.maximum(diagonal // pipeline.chunk_size * pipeline.chunk_size)
    return first


def kept_pairs(pipeline: Pipeline, qo_len: int, kv_len: int) -> int:
    """Number of query-key pairs that kept() keeps without a custom mask."""
    diagonal = torch.arange(kv_len - qo_len, kv_len, device="cpu")
    last = diagonal if pipeline.causal else torch.full_like(diagonal, kv_len - 1)
    return int((last - _first_keys(pipeline, diagonal) + 1).clamp(min=0).sum())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pipeline: Pipeline,
    *,
    custom: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> Expected:
    """One request: q [L, Hq, Dqk], k [S, Hkv, Dqk], v [S, Hkv, Dvo], any float dtype and device.

    `rows` selects query rows (indices into [0, L)); the answer then has only those. Inputs are
    upcast exactly; NaN and Inf in them propagate.
    """
    products_of_8_bits = q.dtype.itemsize == 1 or pipeline.quantizes_q
    q = quantized_rows(q) if pipeline.quantizes_q else q
    (kv_len, num_kv_heads), qo_len, device = k.shape[:2], q.shape[0], q.device
    keep = kept(pipeline, qo_len, kv_len, custom, rows, device)
    rows = torch.arange(qo_len, device=device) if rows is None else rows.to(device)
    # [Hkv, G, rows, D] against [Hkv, 1, S, D]: query head h reads KV head h // G.
    scales = pipeline.scales
    q64 = _scaled(q[rows], scales.q).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k64 = _scaled(k, scales.k).permute(1, 0, 2)[:, None]
    v64 = _scaled(v, scales.v).permute(1, 0, 2)[:, None]

    if pipeline.rope is not None:
        q64 = pipeline.rope.rotate(q64, rows + (kv_len - qo_len))
        k64 = pipeline.rope.rotate(k64, torch.arange(kv_len, device=device))

    x = q64 @ k64.transpose(-1, -2) * pipeline.sm_scale
    if pipeline.soft_cap > 0:
        x = pipeline.soft_cap * torch.tanh(x / pipeline.soft_cap)
    bias_bound = x.new_zeros(x.shape[:-1])
    if pipeline.slopes is not None:
        slopes = pipeline.slopes.to(device).view(num_kv_heads, -1, 1, 1)
        origin = 0 * rows if pipeline.bias_from_key_0 else rows
        bias = slopes * (torch.arange(kv_len, device=device) - origin[:, None])
        x += bias
        bias_bound = _most(bias.abs().masked_fill(~keep, 0.0), 0.0)
    x = x.masked_fill(~keep, -math.inf)

    # [Hkv, G, rows] from here on, but for the probabilities and what is made with v.
    largest = _most(x, -math.inf)
    sink = torch.full_like(largest, -math.inf)
    if pipeline.sinks is not None:
        sink.copy_(pipeline.sinks.view(num_kv_heads, -1, 1))
    anchor = _finite(torch.maximum(largest, sink))
    weights = torch.exp(x - anchor[..., None])
    total = weights.sum(-1) + torch.exp(sink - anchor)
    empty = ~keep.any(-1).expand_as(total)
    p = (weights / total[..., None]).masked_fill(empty[..., None], 0.0)
    scale = abs(pipeline.sm_scale)
    logit_bound = scale * q64.norm(dim=-1) * _most(k64.norm(dim=-1), 0.0)[..., None]
    logit_spread = torch.zeros_like(logit_bound)
    if pipeline.rope is not None:
        logit_spread = scale * _most(q64.square() @ k64.square().transpose(-1, -2), 0.0).sqrt()
    out = p @ v64
    product_bound, small = torch.zeros_like(logit_bound), torch.zeros_like(out)
    if products_of_8_bits:
        product_bound = scale * _largest_sum(q64, k64)
        small = torch.minimum(p, 2.0**-12 * _most(p, 0.0)[..., None]) @ v64.abs()
    per_row = {
        "out": out * pipeline.out_scale,
        "lse": torch.where(empty, sink, torch.log(total) + anchor) * LOG2_E,
        "largest": largest,
        "total": torch.exp(x - _finite(largest)[..., None]).sum(-1),
        "empty": empty,
        "spread": torch.sqrt(p.square() @ v64.square()) * abs(pipeline.out_scale),
        "logit_bound": logit_bound,
        "logit_spread": logit_spread,
        "bias_bound": bias_bound,
        "product_bound": product_bound,
        "small": small * abs(pipeline.out_scale),
    }
    return Expected(
        **{name: value.movedim(2, 0).flatten(1, 2) for name, value in per_row.items()},
        value_bound=float(v64.abs().max()) * abs(pipeline.out_scale) if v64.numel() else 0.0,
        longest_kv=kv_len,
    )


def _most(x: torch.Tensor, least: float) -> torch.Tensor:
    """The largest along the last dimension, which may be empty, and `least` at least."""
    return torch.nn.functional.pad(x, (0, 1), value=least).amax(-1)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x == -math.inf, 0.0)


def _largest_sum(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Largest intermediate of q.k for each row of q [..., rows, D] with any of k [..., S, D]:
    |q_d k_d|, with |k_d| bounded by its maximum, and |sums| of the first 32, 64, ... dimensions."""
    products = q.abs() * _most(k.abs().transpose(-1, -2), 0.0)[..., None, :]
    largest, total = products.amax(-1), 0.0
    for first in range(0, q.shape[-1], 32):
        steps = slice(first, first + 32)
        total = total + q[..., steps] @ k[..., steps].transpose(-1, -2)
        largest = largest.maximum(_most(total.abs(), 0.0))
    return largest


def concatenate(parts: Sequence[Expected]) -> Expected:
    """The rows of several requests one after the other, as the batch wrappers return them."""

    def joined(name: str) -> torch.Tensor | float:
        values = [getattr(part, name) for part in parts]
        return torch.cat(values) if isinstance(values[0], torch.Tensor) else max(values)

    return Expected(**{field.name: joined(field.name) for field in dataclasses.fields(Expected)})


def reference(
    inputs, *, pipeline: Pipeline | None = None, rows: Sequence[torch.Tensor | None] | None = None
) -> Expected:
    """The expected result of `Inputs`; `rows[i]` picks local rows of request i (None: all)."""
    pipeline = inputs.pipeline if pipeline is None else pipeline
    rows = [None] * inputs.case.batch_size if rows is None else rows
    requests = map(inputs.request, range(inputs.case.batch_size))
    return concatenate(
        [
            attend(one.q, one.k, one.v, pipeline, custom=one.mask, rows=picked)
            for one, picked in zip(requests, rows, strict=True)
        ]
    )


def merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges v [tokens, states, heads, dim] with base-2 s [tokens, states, heads], in float64."""
    v64, s64 = v.double(), s.double()
    anchor = _finite(s64.amax(1, keepdim=True))
    weight = torch.exp2(s64 - anchor)
    total = weight.sum(1)
    empty = total == 0
    # A state with weight zero contributes nothing, whatever it holds.
    terms = (weight[..., None] * v64).masked_fill(~(weight[..., None] > 0), 0.0)
    out = terms.sum(1) / total.masked_fill(empty, 1.0)[..., None]
    lse = (torch.log2(total) + anchor.squeeze(1)).masked_fill(empty, -math.inf)
    return out.masked_fill(empty[..., None], 0.0), lse
