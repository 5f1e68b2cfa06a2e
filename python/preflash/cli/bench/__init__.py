"""`bench`: speed tables of the wrappers beside torch and cuDNN, of prefill beside decode, and of
trtllm_fmha_v2_prefill; everything in one run."""

from __future__ import annotations

import argparse
import json

import torch

import preflash

from ..._check import dtypes
from ...testing.case import flops
from .. import CommandError, check_writable
from ..console import progress
from ..machine import Place, choose_places, long_name
from . import plot
from .fmha import fmha_calls, fmha_rows_for, fmha_table
from .measure import Result, measured, row_calls, row_table
from .pod import pod_calls, pod_rows_for, pod_table
from .reports import compare
from .rows import BenchRow, Row, rows_for
from .trace import PICTURES, trace, why_no_picture

# Rows of one kind are a table, and a list in the report: which there are, their calls, the table.
_KINDS = {
    "rows": (rows_for, row_calls, row_table),
    "pod": (pod_rows_for, pod_calls, pod_table),
    "fmha": (fmha_rows_for, fmha_calls, fmha_table),
}
_DTYPES = ("bf16", "f16", "f32")


def execute(args: argparse.Namespace) -> int:
    _check_report(args)
    if args.compare is not None:
        print(compare(args.compare, args.plot))
        return 0
    place = choose_places(args.backend)[0]
    chosen = _chosen_rows(args, place)
    rows, pods = chosen["rows"], chosen["pod"]
    if args.plot is not None and not any(plot.can_draw(row.name) for row in rows):
        raise CommandError(
            f"--plot {args.plot}: draws the {plot.DRAWN}, and --rows {args.rows} names none"
        )
    if args.trace is not None:
        trace(args.trace, place, (rows if args.rows else []) or [*pods, *rows])
        return 0
    repeats = args.repeats or (3 if args.quick else 11 if place.device.type == "cuda" else 5)
    machine = _machine(place, repeats)
    print(_headline(place, machine))
    tables: dict[str, list[Result]] = {key: [] for key in _KINDS}
    with progress(sum(map(len, chosen.values())), "bench") as step:
        for key, (_, calls_of, _) in _KINDS.items():
            for row in chosen[key]:
                tables[key].append(measured(calls_of, row, place, repeats))
                step(row.name)
    document = {"machine": machine}
    for key, (_, _, table) in _KINDS.items():
        if tables[key]:
            print(f"\n{table(tables[key])}")
        document[key] = [_as_json(one) for one in tables[key]]
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {args.json}")
    failures = [one for results in tables.values() for one in results if one.failure]
    for result in failures:
        print(f"FAILED {result.row.name}: {result.failure}")
    if args.plot is not None:
        drawn, count = plot.timed(document["rows"]), sum(map(len, tables.values()))
        title = "preflash {preflash} {backend}, {name}".format_map(machine)
        plot.draw(drawn, title, args.plot, plot.roofs(place, drawn))
        print(f"wrote {args.plot}: {len(drawn)} of {count} rows, the {plot.DRAWN}")
    return 1 if failures else 0


def _check_report(args: argparse.Namespace) -> None:
    """Refuses what could not be written once the work is done."""
    if args.trace is not None and args.compare is not None:
        raise CommandError(f"--trace {args.trace}: --compare runs nothing; leave one of them out")
    if args.plot is not None and (why := why_no_picture()):
        raise CommandError(f"--plot {args.plot}: {why}")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is None:
            continue
        if args.trace is not None:
            raise CommandError(f"{option} {path}: --trace measures nothing; leave one of them out")
        if args.compare is not None and option == "--json":
            raise CommandError(f"--json {path}: --compare measures nothing; leave one of them out")
        if path.is_dir():
            raise CommandError(f"{option} {path}: it is a directory")
        if option == "--plot" and path.suffix not in PICTURES:
            raise CommandError(f"--plot {path}: must end with .png, .svg or .pdf")
        check_writable(option, path)


def _chosen_rows(args: argparse.Namespace, place: Place) -> dict[str, list[BenchRow]]:
    """By kind."""
    default = "bf16" if place.device.type == "cuda" or args.quick else "f32,bf16,f16"
    asked = (args.dtype or default).split(",")
    known = {long_name(name): dtypes.SHORT_DTYPES[name] for name in _DTYPES}
    if unknown := [name for name in asked if long_name(name) not in known]:
        there = ", ".join(f"{short} ({long})" for short, long in zip(_DTYPES, known, strict=True))
        raise CommandError(f"--dtype {unknown[0]}: there are {there}")
    chosen_dtypes = list(dict.fromkeys(known[long_name(name)] for name in asked))
    if unfit := [dtype for dtype in chosen_dtypes if dtype not in place.dtypes]:
        raise CommandError(f"--dtype {args.dtype}: {place.backend} does not take {unfit[0]}")
    chosen, names = {}, []
    for key, (rows_for_device, _, _) in _KINDS.items():
        rows = rows_for_device(place.device.type, args.quick)
        names += [row.name for row in rows]
        rows = [row for row in rows if any(part in row.name for part in args.rows.split(","))]
        chosen[key] = [row.with_dtype(dtype) for dtype in chosen_dtypes for row in rows]
    if not any(chosen.values()):
        there = ", ".join(names)
        raise CommandError(f"--rows {args.rows!r} names no row; there are: {there}")
    return chosen


def _machine(place: Place, repeats: int) -> dict:
    return {
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


def _headline(place: Place, machine: dict) -> str:
    about = "{threads} threads; wall time"
    if place.device.type == "cuda":
        about = "CUDA {cuda}, cuDNN {cudnn}; interleaved kernel times by graph replay"
    where = "preflash {preflash}, {backend} on {device}, {name}, torch {torch}"
    return ", ".join([where, about, "median of {repeats}"]).format_map(machine)


def _as_json(result: Result) -> dict:
    row = result.row
    about: dict = {"name": row.name, "dtype": row.dtype_name}
    if isinstance(row, Row):
        about |= {
            "case": row.case.id,
            "unit": row.metric.value,
            "flops": flops(row.case),
            "bytes": row.bytes(),
            "speed": {name: result.speed(name) for name in result.us},
            "relative_to": row.relative_to and row.relative_to.name,
        }
    return about | {name: value for name, value in vars(result).items() if name != "row"}
