"""trtllm_fmha_v2_prefill: what chunks, windows and skipped tiles leave of the time of causal
attention on the same tensors, and what skipping costs in accuracy."""

from __future__ import annotations

import dataclasses
import enum

import torch

import preflash

from ...testing import timing
from ...testing.comparison import compare, logit_roundings
from ...testing.inputs import indptr
from ...testing.oracle import Pipeline, attend
from ..console import Table
from ..machine import Place

_HEAD_DIM = 128
_WORKSPACE_BYTES = 64 * 1024 * 1024
_ROWS = 5  # compared with the oracle
_LONG = 32768  # tokens of which a graph holds two calls only


class Logits(enum.Enum):
    """What the weights of a row look like."""

    GAUSSIAN = "gaussian"  # independent normal logits
    PEAKED = "peaked"  # those of the first block of 128 keys and every 16th one are 4 larger


@dataclasses.dataclass(frozen=True)
class Mode:
    """Options of the function beside causal attention."""

    window_left: int = -1
    chunk: int = 0
    factor: float = 0.0

    @property
    def name(self) -> str:
        if self.window_left >= 0:
            return f"window {self.window_left}"
        if self.chunk:
            return f"chunks of {self.chunk}"
        return f"skip {self.factor:g}" if self.factor else "causal"

    @property
    def options(self) -> dict[str, object]:
        mode = "causal"
        if self.window_left >= 0:
            mode = "sliding_window"
        elif self.chunk:
            mode = "chunked"
        return {
            "mask_mode": mode,
            "window_left": self.window_left,
            "chunked_attention_size": self.chunk,
            "skip_softmax_threshold_scale_factor": self.factor,
        }

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            _HEAD_DIM**-0.5, causal=True, window_left=self.window_left, chunk_size=self.chunk
        )

    def pairs(self, tokens: int) -> int:
        """Of a query and a key that it keeps, tiles that are skipped included."""
        position = torch.arange(tokens, device="cpu")
        kept = position + 1
        if self.window_left >= 0:
            kept = kept.clamp(max=self.window_left + 1)
        if self.chunk:
            kept = position % self.chunk + 1
        return int(kept.sum())


CAUSAL = Mode()


@dataclasses.dataclass(frozen=True)
class FmhaRow:
    """One request of as many keys as queries, by every mode."""

    tokens: int
    num_heads: int
    num_kv_heads: int
    logits: Logits
    modes: tuple[Mode, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"fmha s{self.tokens} h{self.num_heads}/{self.num_kv_heads} {self.logits.value}"

    def with_dtype(self, dtype: torch.dtype) -> FmhaRow:
        return dataclasses.replace(self, dtype=dtype)

    def flops(self, mode: Mode) -> float:
        return 4.0 * _HEAD_DIM * self.num_heads * mode.pairs(self.tokens)


_SKIPS = (Mode(factor=500.0), Mode(factor=10000.0))


def _masks(*windows: int, chunks: tuple[int, ...]) -> tuple[Mode, ...]:
    return (*(Mode(window_left=n) for n in windows), *(Mode(chunk=n) for n in chunks))


def fmha_rows_for(device_type: str, quick: bool) -> list[FmhaRow]:
    gaussian, peaked = Logits.GAUSSIAN, Logits.PEAKED
    if quick or device_type == "cpu":
        tokens = 256 if quick else 2048
        modes = (CAUSAL, *_masks(tokens // 16, chunks=(tokens // 4,)), *_SKIPS)
        return [FmhaRow(tokens, 4, 1, gaussian, modes)]
    at_16k = (CAUSAL, *_masks(1024, 4096, chunks=(1024, 2048, 4096, 8192)))
    at_64k = (CAUSAL, *_masks(1024, chunks=(8192,)))
    return [
        FmhaRow(16384, 16, 4, gaussian, (*at_16k, *_SKIPS)),
        FmhaRow(16384, 16, 4, peaked, (CAUSAL, *_SKIPS)),
        FmhaRow(65536, 8, 2, gaussian, (*at_64k, *_SKIPS)),
        FmhaRow(65536, 8, 2, peaked, (CAUSAL, *_SKIPS)),
    ]


@dataclasses.dataclass
class FmhaResult:
    """Of each mode by its name: microseconds; for skipping, the relative Frobenius distance to
    causal attention; why there is none."""

    row: FmhaRow
    us: dict[str, float] = dataclasses.field(default_factory=dict)
    distance: dict[str, float] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    failure: str = ""


class _Tensors:
    """q, k and v of a row, and one call for each mode."""

    def __init__(self, row: FmhaRow, place: Place) -> None:
        self._row, self._place = row, place
        random = torch.Generator(place.device).manual_seed(0)

        def normal(heads: int) -> torch.Tensor:
            shape = (row.tokens, heads, _HEAD_DIM)
            return torch.randn(shape, dtype=row.dtype, device=place.device, generator=random)

        heads, kv_heads = row.num_heads, row.num_kv_heads
        self._q, self._k, self._v = normal(heads), normal(kv_heads), normal(kv_heads)
        if row.logits is Logits.PEAKED:
            self._add_peaks()
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=place.device)
        # Lengths on a GPU, where a graph finds them.
        self._offsets = indptr([row.tokens], place.device)

    def _add_peaks(self) -> None:
        block = torch.arange(self._row.tokens, device=self._k.device) // 128
        high = 2.0 * _HEAD_DIM**0.25  # of q and of k: 4 in the logit
        self._q[..., 0] = high
        self._k[..., 0] = (block % 16 == 0).to(self._k.dtype)[:, None] * high

    def call(self, mode: Mode):
        row = self._row
        out = torch.empty_like(self._q)

        def call() -> torch.Tensor:
            return preflash.trtllm_fmha_v2_prefill(
                (self._q, self._k, self._v),
                "SEPARATE_Q_K_V",
                self._workspace,
                self._offsets[1:],
                row.tokens,
                row.tokens,
                _HEAD_DIM**-0.5,
                1.0,
                1,
                self._offsets,
                self._offsets,
                out=out,
                backend=self._place.backend,
                **mode.options,
            )

        return call

    def failures(self, mode: Mode, out: torch.Tensor) -> list[str]:
        """Of some rows, beside the oracle; those at the ends are where masks go wrong."""
        tokens = self._row.tokens
        rows = torch.linspace(0, tokens - 1, _ROWS, dtype=torch.float64, device="cpu").long()
        expected = attend(self._q, self._k, self._v, mode.pipeline, rows=rows)
        taken = out[rows.to(out.device)]
        rounding = logit_roundings(_HEAD_DIM)
        return compare(taken, None, expected, logit_rounding=rounding).failures


def measure_fmha(row: FmhaRow, place: Place, repeats: int) -> FmhaResult:
    """Checks every mode, then times them interleaved."""
    result = FmhaResult(row)
    tensors = _Tensors(row, place)
    calls, outs = {}, {}
    for mode in row.modes:
        try:
            call = tensors.call(mode)
            outs[mode.name] = call().clone()
        except NotImplementedError as error:
            result.absent[mode.name] = str(error)
            continue
        calls[mode.name] = call
        if mode.factor:
            result.distance[mode.name] = _distance(outs[mode.name], outs[CAUSAL.name])
        elif failures := tensors.failures(mode, outs[mode.name]):
            result.failure = f"{mode.name}: {failures[0]}"
            return result
    outs.clear()
    if place.device.type == "cpu":
        for name, call in calls.items():
            result.us[name] = timing.cpu_wall_time(call, min_samples=repeats).median_us
        return result
    each = 2 if row.tokens >= _LONG else 10
    replays = {name: timing.GraphReplay(call, each) for name, call in calls.items()}
    for name, taken in timing.interleaved(replays, repeats).items():
        result.us[name] = taken.median_us
    return result


def _distance(out: torch.Tensor, other: torch.Tensor) -> float:
    return float((out.float() - other.float()).norm() / other.float().norm())


def fmha_table(results: list[FmhaResult]) -> Table:
    headers = ["row", "mode", "us", "TFLOP/s", "of causal's time", "of its pairs", "distance"]
    table = Table(headers, frozenset(headers[2:]))
    for result in results:
        row = result.row
        for mode in row.modes:
            cells: list[str | None] = [None, None, None]
            name = mode.name
            if name in result.us:
                us = result.us[name]
                speed = row.flops(mode) / us / 1e6
                cells = [f"{us:.1f}", f"{speed:.4g}", f"{us / result.us[CAUSAL.name]:.3f}"]
            state = "WRONG" if result.failure else "not compiled" if name in result.absent else name
            table.add(
                row.name,
                name if state == name else f"{name}: {state}",
                *cells,
                f"{mode.pairs(row.tokens) / CAUSAL.pairs(row.tokens):.3f}",
                f"{result.distance[name]:.2g}" if name in result.distance else None,
            )
    return table.without_empty_columns()
