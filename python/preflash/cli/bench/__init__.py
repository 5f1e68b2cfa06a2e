"""`bench`: speed tables, of the wrappers beside torch's scaled_dot_product_attention and cuDNN, of
prefill beside decode, and of trtllm_fmha_v2_prefill; everything in one run."""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import dataclass

import torch

import preflash

from ...testing.case import flops
from .. import CommandError, check_writable
from ..console import Progress, Table
from ..machine import Place, choose_places, torch_dtype
from .fmha import FmhaResult, FmhaRow, fmha_rows_for, fmha_table, measure_fmha
from .measure import BASE, OURS, Result, measure_row
from .pod import PodResult, PodRow, measure_pod, pod_rows_for, pod_table
from .rows import Row, rows_for
from .trace import TraceFiles, trace_row


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows",
        default="",
        help="only rows whose name contains this; or one of several with commas",
    )
    parser.add_argument("--backend", help="cpu, fa2 or fa3; by default the fastest on this machine")
    parser.add_argument("--dtype", help="bf16, f16, f32, or several with commas")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write results to FILE")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="measure nothing: record when and where each work item of one launch ran. The row is "
        "the first that --rows names, else the first of prefill beside decode. FILE.json is a "
        "trace for ui.perfetto.dev, FILE.png, .svg or .pdf a picture (pip install "
        "'preflash[trace]'), FILE without an ending both, FILE.json and FILE.png. On a GPU it "
        "takes kernels built with PREFLASH_TRACE=ON",
    )
    parser.add_argument("--quick", action="store_true", help="few small rows, few repeats")
    parser.add_argument("--repeats", type=_positive, help="samples per call; the median counts")


def execute(args: argparse.Namespace) -> int:
    place = choose_places(args.backend)[0]
    _check_report(args)
    chosen = _chosen_rows(args, place)
    if args.trace is not None:
        named = chosen.rows if args.rows else []
        return _trace(args, place, named or [*chosen.pods, *chosen.rows])
    repeats = args.repeats or (3 if args.quick else 11 if place.device.type == "cuda" else 5)
    print(_headline(place, repeats))
    results = []
    beside: list[PodResult] = []
    modes: list[FmhaResult] = []
    with Progress(chosen.count, "bench") as progress:
        for row in chosen.rows:
            results.append(measure_row(row, place, repeats))
            progress.step(row.name)
        for pod in chosen.pods:
            beside.append(measure_pod(pod, place, repeats))
            progress.step(pod.name)
        for fmha in chosen.fmhas:
            modes.append(measure_fmha(fmha, place, repeats))
            progress.step(fmha.name)
    if results:
        print(_table(results))
        _print_notes(results)
    if beside:
        print(pod_table(beside))
        print("\nof sum, of larger: the time of both in that of the prefill and the decode alone.")
    if modes:
        print(fmha_table(modes))
        print("\npairs: of a query and a key that the mask keeps. distance: to causal's output.")
    if args.json is not None:
        document = _as_json(results, place, repeats)
        document["pod"] = [_pod_as_json(result) for result in beside]
        document["fmha"] = [_fmha_as_json(result) for result in modes]
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    failures = [result for result in (*results, *beside, *modes) if result.failure]
    for result in failures:
        print(f"FAILED {result.row.name}: {result.failure}")
    return 1 if failures else 0


def _check_report(args: argparse.Namespace) -> None:
    """Refuses what could not be written once the work is done."""
    path = args.json
    if path is None:
        return
    if args.trace is not None:
        raise CommandError(f"--json {path}: --trace measures nothing; leave one of them out")
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise CommandError(f"--json {path}: {why}")
    check_writable("--json", path)


def _trace(args: argparse.Namespace, place: Place, rows: list[Row | PodRow]) -> int:
    files = TraceFiles.of(args.trace)
    if not rows:
        raise CommandError(f"--rows {args.rows!r}: --trace takes a row of the wrappers or of pod")
    if len(rows) > 1:
        print(f"{rows[0].name}, the first of {len(rows)} rows")
    timeline = trace_row(rows[0], place)
    print(f"{timeline.title}\n{timeline.summary()}")
    for path in files.write(timeline):
        print(f"wrote {path}")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


@dataclass(frozen=True)
class _Chosen:
    rows: list[Row]
    pods: list[PodRow]
    fmhas: list[FmhaRow]

    @property
    def count(self) -> int:
        return len(self.rows) + len(self.pods) + len(self.fmhas)


def _chosen_rows(args: argparse.Namespace, place: Place) -> _Chosen:
    default = "bf16" if place.device.type == "cuda" or args.quick else "f32,bf16,f16"
    dtypes = [torch_dtype(name) for name in (args.dtype or default).split(",")]
    if unfit := [dtype for dtype in dtypes if dtype not in place.dtypes]:
        raise CommandError(f"--dtype {args.dtype}: {place.backend} does not take {unfit[0]}")
    every = [of(place.device.type, args.quick) for of in (rows_for, pod_rows_for, fmha_rows_for)]
    wanted = args.rows.split(",")
    named = [[row for row in rows if any(part in row.name for part in wanted)] for rows in every]
    if not any(named):
        names = ", ".join(row.name for rows in every for row in rows)
        raise CommandError(f"--rows {args.rows!r} names no row; there are: {names}")
    return _Chosen(*([row.with_dtype(dtype) for dtype in dtypes for row in rows] for rows in named))


def _headline(place: Place, repeats: int) -> str:
    parts = [f"preflash {preflash.__version__}", place.label, place.device_name]
    parts += [f"torch {torch.__version__}"]
    if place.device.type == "cuda":
        parts += [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
        clock = "interleaved kernel times by graph replay"
    else:
        parts += [f"{torch.get_num_threads()} threads"]
        clock = "wall time"
    return f"{', '.join(parts)}; {clock}, median of {repeats}"


def _dtype_name(result: Result) -> str:
    return str(result.row.case.dtype).removeprefix("torch.")


def _baseline_names(results: list[Result]) -> list[str]:
    """The names of all baselines, in the order in which they first appear."""
    names = [name for result in results for name in (*result.us, *result.absent)]
    return [name for name in dict.fromkeys(names) if name not in (OURS, BASE)]


def _table(results: list[Result]) -> Table:
    baselines = _baseline_names(results)
    headers = ["row", "dtype", "unit", OURS, *baselines, "of base", "us", "plan us", "run CPU us"]
    headers += ["error / allowed"]
    table = Table(headers, frozenset(headers[3:]))
    for result in results:
        base = result.us.get(BASE)
        timed = OURS in result.us
        table.add(
            result.row.name,
            _dtype_name(result),
            result.row.metric.value,
            _our_cell(result),
            *(_baseline_cell(result, name) for name in baselines),
            f"{base / result.us[OURS]:.2f}" if base and timed else None,
            f"{result.us[OURS]:.1f}" if timed else None,
            _rounded(result.plan_us, 0),
            _rounded(result.run_cpu_us, 1),
            _rounded(result.error_ratio, 2),
        )
    return table.without_empty_columns()


def _our_cell(result: Result) -> str:
    if result.failure:
        return "WRONG"
    return f"{result.speed(OURS):.4g}" if OURS in result.us else "not compiled"


def _baseline_cell(result: Result, name: str) -> str | None:
    """A baseline's speed and, in brackets, how many times as fast preflash is."""
    if name not in result.us:
        return None
    speed = result.speed(name)
    if OURS not in result.us:
        return f"{speed:.4g}"
    return f"{speed:.4g} ({result.speed(OURS) / speed:.2f}x)"


def _rounded(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _print_notes(results: list[Result]) -> None:
    print("\n(1.20x): preflash is 1.20 times as fast. TFLOP/s counts kept pairs: half for causal.")
    reasons = {f"{name}: {reason}" for result in results for name, reason in result.absent.items()}
    for reason in sorted(reasons):
        print(f"not timed: {reason}")


def _as_json(results: list[Result], place: Place, repeats: int) -> dict:
    machine = {
        "device": str(place.device),
        "name": place.device_name,
        "backend": place.backend,
        "preflash": preflash.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    return {"machine": machine, "rows": [_row_as_json(result) for result in results]}


def _pod_as_json(result: PodResult) -> dict:
    return {
        "name": result.row.name,
        "dtype": str(result.row.prefill.dtype).removeprefix("torch."),
        "variant": result.variant,
        "launches": result.launches,
        "us": result.us,
        "plan_us": result.plan_us,
        "run_cpu_us": result.run_cpu_us,
        "failure": result.failure,
        "absent": result.absent,
    }


def _fmha_as_json(result: FmhaResult) -> dict:
    return {
        "name": result.row.name,
        "dtype": str(result.row.dtype).removeprefix("torch."),
        "us": result.us,
        "distance": result.distance,
        "failure": result.failure,
        "absent": result.absent,
    }


def _row_as_json(result: Result) -> dict:
    row = result.row
    return {
        "name": row.name,
        "case": row.case.id,
        "dtype": _dtype_name(result),
        "variant": result.variant,
        "unit": row.metric.value,
        "flops": flops(row.case),
        "bytes": row.bytes(),
        "us": result.us,
        "speed": {name: result.speed(name) for name in result.us},
        "relative_to": row.relative_to and row.relative_to.name,
        "plan_us": result.plan_us,
        "run_cpu_us": result.run_cpu_us,
        "error_ratio": result.error_ratio,
        "failure": result.failure,
        "absent": result.absent,
    }
