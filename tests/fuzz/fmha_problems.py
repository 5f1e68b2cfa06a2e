"""Problems for trtllm_fmha_v2_prefill: random ones over its options, in every layout, with NaN in
all memory that no request owns, and the answer of the float64 oracle."""

# ruff: noqa: RUF009 (drawn() makes fields, as dataclasses.field() does)
from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import random

import preflash
import torch
from preflash import _core
from preflash.testing import comparison, runner
from preflash.testing.inputs import PAD_COLUMNS
from preflash.testing.oracle import Expected, Pipeline, alibi_slopes, attend, concatenate

from .random_cases import Limits, drawn, random_fields
from .wrapper_trial import Verdict, judged

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16, E4M3)
LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
MODES = ("sliding_window", "chunked", "padding")
SPARE = 3  # rows before the first request and behind the last


class Pools(enum.Enum):
    """Forms in which pages of k and v are given."""

    ONE = "one"  # (q, kv)
    PAIR = "pair"  # (q, (k, v))
    THREE = "three"  # (q, k, v)


@dataclasses.dataclass(frozen=True)
class FmhaCase:
    """Case of one call. PACKED_QKV has as many keys as queries, and as many KV heads as heads."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    layout: str = drawn("SEPARATE_Q_K_V", *LAYOUTS)
    dtype: torch.dtype = drawn(*DTYPES)
    out_dtype: torch.dtype | None = drawn(None, *DTYPES)
    num_heads: int = 4
    num_kv_heads: int = drawn(2, 1, 3)
    head_dim: int = 64
    head_dim_vo: int | None = None  # head_dim; another one where k and v are tensors apart
    wide_rows: bool = drawn(False, False, True)  # NaN behind every row of q, k and v
    page_size: int = drawn(16, 1, 5, 64, 100)
    pools: Pools = drawn(*Pools)
    offsets_of_pages: bool = drawn(True, False)  # cum_seq_lens_kv is given with pages, too
    mask_mode: str = drawn("causal", "CAUSAL", *MODES, *map(str.upper, MODES))
    window_left: int = drawn(-1, 0, 7, 100)
    chunk: int = 0
    soft_cap: float | None = drawn(None, None, 0.0, 3.0, 30.0)
    alibi: bool = drawn(False, False, True)
    sinks: bool = drawn(False, False, True)
    stats: bool = drawn(False, True)
    bmm1: float = drawn(0.125, 0.0884, 1.0, 0.01)
    bmm2: float = drawn(1.0, 0.5, -2.0)
    brings_out: bool = drawn(False, True)
    spare_length: int = drawn(0, 0, 33)  # by which the longest lengths are exceeded
    skip_factor: float = 0.0
    scales_in_tensors: bool = drawn(*[False] * 4, True)
    workspace: int = drawn(1 << 20, 1 << 12, 0)
    seed: int = 0

    @property
    def paged(self) -> bool:
        return "PAGED" in self.layout

    @property
    def dim_vo(self) -> int:
        return self.head_dim if self.head_dim_vo is None else self.head_dim_vo

    @property
    def kv_apart(self) -> bool:
        """True if k and v are separate tensors."""
        pools_apart = self.paged and self.pools is not Pools.ONE
        return pools_apart or self.layout == "SEPARATE_Q_K_V"

    @property
    def pipeline(self) -> Pipeline:
        mode = self.mask_mode.lower()
        sinks = torch.linspace(-2.0, 3.0, self.num_heads) if self.sinks else None
        return Pipeline(
            sm_scale=self.bmm1,
            causal=mode != "padding",
            window_left=self.window_left if mode == "sliding_window" else -1,
            chunk_size=self.chunk if mode == "chunked" else 0,
            soft_cap=self.soft_cap or 0.0,
            out_scale=self.bmm2,
            slopes=alibi_slopes(self.num_heads) if self.alibi else None,
            bias_from_key_0=True,
            sinks=sinks,
        )


def draw(seed: int, index: int, limits: Limits) -> FmhaCase:
    """Draws problem `index` of `seed`, whatever the limits: all lengths are short."""
    rng, seed = random.Random(f"fmha {seed} {index}"), seed << 32 | index
    qo_lens = tuple(rng.choice([0, 1, 3, 17, 64, 65, 130]) for _ in range(rng.randint(1, 4)))
    kv_lens = tuple(max(n + rng.choice([0, 0, 1, 40, 128, 333]) - 20, 0) for n in qo_lens)
    case = FmhaCase(qo_lens, kv_lens, **random_fields(rng, FmhaCase), seed=seed)
    # Rows of 8 bits start on multiples of 16 bytes.
    step = 16 if case.dtype.itemsize == 1 else 8
    any_dim = step * rng.randint(1, 512 // step)
    changes = {
        "num_heads": case.num_kv_heads * rng.choice([1, 2, 5]),
        "head_dim": rng.choice([64, 128, 256, any_dim, any_dim]),
        "chunk": rng.choice([1, 16, 64, 128]),
    }
    if case.layout == "PACKED_QKV":
        changes |= {"kv_lens": qo_lens, "num_heads": case.num_kv_heads}
    if case.kv_apart and rng.random() < 0.2:
        changes |= {"head_dim": 192, "head_dim_vo": 128}
    if not case.stats and rng.random() < 0.1:
        changes["bmm1"] = rng.choice([-0.1, 0.0])
    plain = not (case.stats or case.soft_cap or case.alibi) and case.dtype.itemsize == 2
    if plain and changes["head_dim"] <= 256 and rng.random() < 0.5:
        changes["skip_factor"] = 1e-6  # what it leaves out is nothing beside the rest
    return dataclasses.replace(case, **changes)


@dataclasses.dataclass
class FmhaInputs:
    case: FmhaCase
    arguments: dict  # of the function
    requests: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # dense q, k and v
    qo_indptr: list[int]
    variant: str = ""  # of the kernel that ran last (run)

    @property
    def in_8_bits(self) -> bool:
        """True if the kernel multiplied in 8 bits."""
        return self.variant.startswith(runner.PRODUCTS_OF_8_BITS)

    def expected(self) -> Expected:
        return concatenate([attend(*request, self.case.pipeline) for request in self.requests])

    def of_requests(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.qo_indptr[0] : self.qo_indptr[-1]]


def _rows(offsets: list[int], shape: tuple[int, ...], dtype, generator) -> torch.Tensor:
    """Makes [tokens, *shape], NaN outside the rows of requests."""
    rows = torch.randn(offsets[-1] + SPARE, *shape, generator=generator)
    rows[: offsets[0]] = math.nan
    rows[offsets[-1] :] = math.nan
    return rows.to(dtype)


def build(case: FmhaCase, device: str = "cpu", lengths_on: str | None = None) -> FmhaInputs:
    generator = torch.Generator().manual_seed(case.seed)
    qo, kv = ([*itertools.accumulate(lens, initial=SPARE)] for lens in (case.qo_lens, case.kv_lens))
    q = (qo, (case.num_heads, case.head_dim))
    k, v = ((kv, (case.num_kv_heads, dim)) for dim in (case.head_dim, case.dim_vo))
    operands = [_rows(*each, case.dtype, generator) for each in (q, k, v)]
    requests = [
        tuple(t[at[i] : at[i + 1]] for t, at in zip(operands, (qo, kv, kv), strict=True))
        for i in range(len(case.qo_lens))
    ]
    table = None
    if case.paged:
        operands[1:], table = _pages(case, requests, generator)

    def array(values) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(lengths_on or device)

    def scale(value: float) -> float | torch.Tensor:
        if not case.scales_in_tensors:
            return value
        return torch.tensor([value], dtype=torch.float64, device=device)

    out = None
    if case.brings_out:
        out = torch.full((qo[-1] + SPARE, case.num_heads, case.dim_vo), math.nan)
        out = out.to(case.out_dtype or case.dtype).to(device)
    arguments = {
        "qkv": _arranged(case, *operands, device), "input_layout": case.layout,
        "workspace_buffer": torch.zeros(case.workspace, dtype=torch.uint8, device=device),
        "seq_lens": array(case.kv_lens), "batch_size": len(case.qo_lens),
        "max_q_len": max(case.qo_lens) + case.spare_length,
        "max_kv_len": max(case.kv_lens) + (0 if case.paged else case.spare_length),
        "bmm1_scale": scale(case.bmm1), "bmm2_scale": scale(case.bmm2),
        "cum_seq_lens_q": array(qo),
        "cum_seq_lens_kv": None if case.paged and not case.offsets_of_pages else array(kv),
        "block_tables": None if table is None else array(table),
        "out": out, "out_dtype": case.out_dtype,
        "sinks": [case.pipeline.sinks.to(device)] if case.sinks else None,
        "pos_encoding_mode": "alibi" if case.alibi else None,
        "logits_soft_cap_scale": case.soft_cap, "mask_mode": case.mask_mode,
        "window_left": case.window_left, "chunked_attention_size": case.chunk,
        "save_softmax_stats": case.stats, "skip_softmax_threshold_scale_factor": case.skip_factor,
    }  # fmt: skip
    return FmhaInputs(case, arguments, requests, qo)


def _arranged(case: FmhaCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: str):
    """Makes the argument qkv: tensors on the device, by the case with NaN between rows."""

    def place(*tensors: torch.Tensor) -> torch.Tensor:
        rows = tensors[0] if len(tensors) == 1 else torch.stack(tensors, 1)
        if not case.wide_rows:
            return rows.to(device)
        behind = torch.full((*rows.shape[:-1], PAD_COLUMNS), math.nan).to(case.dtype)
        return torch.cat([rows, behind], -1).to(device)[..., : rows.shape[-1]]

    if case.layout == "PACKED_QKV":
        return place(q, k, v)
    if not case.kv_apart:
        return place(q), place(k, v)
    if case.paged and case.pools is Pools.PAIR:
        return place(q), (place(k), place(v))
    return place(q), place(k), place(v)


def _pages(case: FmhaCase, requests, generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Makes pools of k and v with NaN in slots of no request, and the table of the pages."""
    size = case.page_size
    counts = [-(-length // size) for length in case.kv_lens]
    numbers = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    shape = (len(numbers), size, case.num_kv_heads)
    pools = [torch.full((*shape, d), math.nan).to(case.dtype) for d in (case.head_dim, case.dim_vo)]
    table = torch.full((len(counts), max([*counts, 1]) + 1), 2**30, dtype=torch.int32)
    for i, (_, *kv) in enumerate(requests):
        for page in range(counts[i]):
            number = numbers.pop()
            table[i, page] = number
            rows = slice(page * size, min((page + 1) * size, case.kv_lens[i]))
            for pool, tensor in zip(pools, kv, strict=True):
                pool[number, : rows.stop - rows.start] = tensor[rows]
    if case.layout.endswith("HND"):
        pools = [pool.transpose(1, 2).contiguous() for pool in pools]
    return pools, table


@judged
def examine(case: FmhaCase, backend: str, device: torch.device) -> Verdict:
    """Makes one call. On a GPU lengths are there or on the host, by turns."""
    inputs = build(case, str(device), "cpu" if case.seed % 2 == 0 else None)
    return judge(inputs, run(inputs, backend))


def run(inputs: FmhaInputs, backend: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Makes one call and notes its kernel."""
    result = preflash.trtllm_fmha_v2_prefill(**inputs.arguments, backend=backend)
    inputs.variant = _core.last_variant()
    return result


def judge(inputs: FmhaInputs, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Verdict:
    """Returns everything that is wrong with the function's result."""
    case = inputs.case
    out, stats = result if case.stats else (result, None)
    expected = inputs.expected()
    report = compare_out(inputs, out, expected)
    failures = report.failures + ([] if stats is None else _wrong_stats(inputs, stats, expected))
    if out.dtype != (case.out_dtype or case.dtype):
        failures.append(f"out: {out.dtype}")
    if case.brings_out and out is not inputs.arguments["out"]:
        failures.append("out: another tensor than the one given")
    unowned = torch.cat([out[:SPARE], out[-SPARE:]]).float()
    if not (unowned.isnan() if case.brings_out else unowned == 0).all():
        failures.append("out: rows that no request has are written, or not 0 in a new tensor")
    return Verdict(failures, worst=report.worst_ratio)


def compare_out(
    inputs: FmhaInputs, out: torch.Tensor, expected: Expected, p_dtype: torch.dtype | None = None
) -> comparison.Report:
    """p_dtype: of the weights, where it is not what the case says."""
    case = inputs.case
    # 8 bits that are not multiplied as they are become float16, of which the weights are made.
    widened = torch.float16 if case.dtype == E4M3 else case.dtype
    return comparison.compare(
        inputs.of_requests(out).cpu(),
        None,
        expected,
        p_dtype=p_dtype or (E4M3 if inputs.in_8_bits else widened),
        soft_cap=case.soft_cap or 0.0,
        hardware_cap=out.is_cuda and not case.stats and comparison.capped_by_hardware(),
        logit_rounding=comparison.logit_roundings(case.head_dim),
        equal_values=case.dtype == E4M3 and max(case.kv_lens) == 1,
    )


def _wrong_stats(inputs: FmhaInputs, stats: torch.Tensor, expected: Expected) -> list[str]:
    case, failures = inputs.case, []
    shape = (inputs.qo_indptr[-1] + SPARE, case.num_heads, 2)
    if stats.dtype != torch.float32 or stats.shape != shape:
        return [f"stats: {stats.dtype} of shape {tuple(stats.shape)}"]
    unowned = torch.cat([stats[:SPARE], stats[-SPARE:]]).cpu()
    if not (unowned == torch.tensor([-math.inf, 0.0])).all():
        failures.append("stats: rows that no request has are not -inf and 0")
    largest, total = inputs.of_requests(stats).cpu().double().unbind(-1)
    scale = (1.0 if case.soft_cap else 1.0 / case.bmm1) / math.sqrt(case.head_dim)
    if not torch.equal(largest == -math.inf, expected.empty):
        failures.append("stats: the maximum is -inf elsewhere than in rows without keys")
    if not (total[expected.empty] == 0).all():
        failures.append("stats: rows without keys have a sum")
    bound = comparison.logit_roundings(case.head_dim) * expected.logit_bound
    bound = bound + 8 * (case.soft_cap or 0.0) + 4 * expected.bias_bound
    error = comparison.FLOAT32_ROUNDOFF * bound
    if inputs.in_8_bits:
        products = comparison.PRODUCT_ERRORS * comparison.PRODUCT_GRID
        error = error + products * expected.product_bound
    keeps, wanted = ~expected.empty, expected.largest * scale
    off = (largest - wanted).abs()[keeps]
    if not (off <= (error * scale)[keeps] + 2.0**-20 * (wanted.abs()[keeps] + scale)).all():
        failures.append(f"stats: the maximum is off by up to {off.max():.3g}")
    off = (total / expected.total - 1.0).abs()[keeps]
    if not (off <= 2 * error[keeps] + comparison.LSE_SLACK).all():
        failures.append(f"stats: the sum is off by up to {off.max():.3g} of itself")
    return failures
