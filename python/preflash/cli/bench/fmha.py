"""trtllm_fmha_v2_prefill: what chunks, windows and skipped tiles leave of the time of causal
attention on the same tensors, and what skipping costs in accuracy."""

from __future__ import annotations

import dataclasses
import functools

import torch

import preflash

from ...testing import Case, Inputs, MaskKind, reference, runner
from ...testing.inputs import indptr
from ...testing.oracle import Pipeline, kept_pairs
from ..batches import batches
from ..console import Table
from ..machine import Place
from .baselines import Call
from .measure import Calls, Result, WrongResultError
from .rows import BenchRow

_HEAD_DIM = 128
_WORKSPACE_BYTES = 64 * 1024 * 1024
_ROWS = 5  # compared with the oracle


@dataclasses.dataclass(frozen=True)
class Mode:
    """Options of the function on top of causal attention."""

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
    def pipeline(self) -> Pipeline:
        bounds = {"window_left": self.window_left, "chunk_size": self.chunk}
        return Pipeline(_HEAD_DIM**-0.5, causal=True, **bounds)

    def pairs(self, tokens: int) -> int:
        """Query-key pairs that the mask keeps, those in skipped tiles included."""
        return kept_pairs(self.pipeline, tokens, tokens)


CAUSAL = Mode()


@dataclasses.dataclass(frozen=True)
class FmhaRow(BenchRow):
    """One request of as many keys as queries, by every mode. The logits are independent normal
    numbers, or, `peaked`, those of every 16th block of 128 keys are 4 larger."""

    modes: tuple[Mode, ...]
    peaked: bool

    @property
    def tokens(self) -> int:
        return self.case.qo_lens[0]

    @property
    def calls_per_graph(self) -> int:
        return 2 if self.tokens > 32768 else 10


def _row(tokens: int, num_heads: int, peaked: bool, *modes: Mode) -> FmhaRow:
    kv_heads = num_heads // 4
    name = f"fmha s{tokens} h{num_heads}/{kv_heads} {'peaked' if peaked else 'gaussian'}"
    case = Case(name, (tokens,), (tokens,), num_heads, kv_heads, _HEAD_DIM, mask=MaskKind.CAUSAL)
    return FmhaRow(case, (CAUSAL, *modes, Mode(factor=500.0), Mode(factor=10000.0)), peaked)


def fmha_rows_for(device_type: str, quick: bool) -> list[FmhaRow]:
    if quick or device_type == "cpu":
        tokens = 256 if quick else 2048
        return [_row(tokens, 4, False, Mode(window_left=tokens // 16), Mode(chunk=tokens // 4))]
    masks = [Mode(window_left=n) for n in (1024, 4096)]
    masks += [Mode(chunk=n) for n in (1024, 2048, 4096, 8192)]
    return [
        _row(16384, 16, False, *masks),
        _row(16384, 16, True),
        _row(65536, 8, False, masks[0], masks[-1]),
        _row(65536, 8, True),
    ]


def fmha_calls(result: Result, place: Place, repeats: int) -> Calls:
    """A call for each mode; those that skip nothing are right, the others' distance is known."""
    row = result.row
    inputs = next(batches(row.case, place.device))
    if row.peaked:
        _add_peaks(inputs)
    calls, outs = {}, {}
    for mode in row.modes:
        call = _call(inputs, mode, place)
        try:
            out = outs[mode.name] = call().clone()
        except NotImplementedError as error:
            result.absent[mode.name] = str(error)
            continue
        calls[mode.name] = [call]
        if mode.factor:
            causal = outs[CAUSAL.name].float()
            result.distance[mode.name] = float((out.float() - causal).norm() / causal.norm())
        else:
            _check(inputs, mode, out)
    return calls


def _add_peaks(inputs: Inputs) -> None:
    block = torch.arange(inputs.k.shape[0], device=inputs.k.device) // 128
    high = 2.0 * _HEAD_DIM**0.25  # in q and in k: adds 4 to the logit
    inputs.q[..., 0] = high
    inputs.k[..., 0] = (block % 16 == 0).to(inputs.k.dtype)[:, None] * high


def _call(inputs: Inputs, mode: Mode, place: Place) -> Call:
    tokens = inputs.q.shape[0]
    offsets = indptr([tokens], place.device)  # lengths on a GPU, where a graph finds them
    bounded = "sliding_window" if mode.window_left >= 0 else "causal"
    return functools.partial(
        preflash.trtllm_fmha_v2_prefill,
        (inputs.q, inputs.k, inputs.v),
        "SEPARATE_Q_K_V",
        runner.workspace(place.device, _WORKSPACE_BYTES),
        *(offsets[1:], tokens, tokens, _HEAD_DIM**-0.5, 1.0, 1, offsets, offsets),
        mask_mode="chunked" if mode.chunk else bounded,
        window_left=mode.window_left,
        chunked_attention_size=mode.chunk,
        skip_softmax_threshold_scale_factor=mode.factor,
        out=torch.empty_like(inputs.q),
        backend=place.backend,
    )


def _check(inputs: Inputs, mode: Mode, out: torch.Tensor) -> None:
    """Checks some rows against the oracle, with the first and the last, where masks go wrong."""
    last = inputs.q.shape[0] - 1
    rows = torch.linspace(0, last, _ROWS, dtype=torch.float64, device="cpu").long()
    expected = reference(inputs, pipeline=mode.pipeline, rows=[rows])
    report = runner.compare(inputs, out[rows.to(out.device)], None, expected)
    if not report.ok:
        raise WrongResultError(f"{mode.name}: {report.failures[0]}")


def fmha_table(results: list[Result]) -> str:
    measured = {"us": ".1f", "TFLOP/s": ".4g", "of causal's time": ".3f"}
    table = Table({"row": "", "mode": "", **measured, "of its pairs": ".3f", "distance": ".2g"})
    for result in results:
        row = result.row
        for mode in row.modes:
            name, us, pairs = mode.name, result.us.get(mode.name), mode.pairs(row.tokens)
            flops = 4.0 * _HEAD_DIM * row.case.num_qo_heads * pairs
            times = (us, flops / us / 1e6, us / result.us[CAUSAL.name]) if us else (None,) * 3
            absent = ": not compiled" if name in result.absent else ""
            verdict = ": WRONG" if result.failure else absent
            numbers = (*times, pairs / CAUSAL.pairs(row.tokens), result.distance.get(name))
            table.add(row.name, name + verdict, *numbers)
    note = "pairs: of a query and a key that the mask keeps. distance: to causal's output."
    return f"{table}\n\n{note}"
