"""`variants`: the compiled kernels of this build, filtered, as a table or as JSON."""

from __future__ import annotations

import argparse
import json

from .. import _core
from . import CommandError, support
from .console import Table


def configure(parser: argparse.ArgumentParser) -> None:
    families = [f"{f.name} ({_core.traits_of(f).backend})" for f in _core.families()]
    parser.add_argument("--family", help=f"or its backend: {', '.join(families)}")
    parser.add_argument("--dtype", help="of q: f16, bf16, f32, e4m3")
    parser.add_argument("--head-dim", help="64, 128, 192x128, ...")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    parser.add_argument(
        "--support", action="store_true", help="print what a full build serves, as docs/support.md"
    )


def execute(args: argparse.Namespace) -> int:
    if args.support:
        print(support.table(), end="")
        return 0
    kernels = sorted(_core.kernels(), key=lambda kernel: kernel["id"])
    chosen = [kernel for kernel in kernels if _matches(kernel, args)]
    if not chosen:
        raise CommandError(_nothing_left(kernels, args))
    if args.json:
        print(json.dumps(chosen, indent=2))
        return 0
    print(_table(chosen))
    print(f"{len(chosen)} of {len(kernels)} compiled variants")
    if absent := _core.cuda_error():
        print(f"no GPU kernels: {absent}")
    return 0


def head_dim(kernel: dict) -> str:
    """The head dimensions as ids spell them: 128, or 192x128."""
    qk, vo = kernel["head_dim_qk"], kernel["head_dim_vo"]
    return str(qk) if qk == vo else f"{qk}x{vo}"


def _matches(kernel: dict, args: argparse.Namespace) -> bool:
    return (
        args.family in (None, kernel["family"], kernel["backend"])
        and args.dtype in (None, kernel["q_dtype"])
        and args.head_dim in (None, head_dim(kernel))
    )


def _nothing_left(kernels: list[dict], args: argparse.Namespace) -> str:
    asked = ", ".join(
        f"--{name.replace('_', '-')} {value}"
        for name in ("family", "dtype", "head_dim")
        if (value := getattr(args, name)) is not None
    )
    have = {
        "families": {kernel["family"] for kernel in kernels},
        "dtypes": {kernel["q_dtype"] for kernel in kernels},
        "head_dims": {head_dim(kernel) for kernel in kernels},
    }
    offers = "; ".join(f"{name} {', '.join(sorted(values))}" for name, values in have.items())
    return f"no compiled variant matches {asked or 'anything'}; there are {offers}"


def _table(kernels: list[dict]) -> Table:
    right = frozenset({"head_dim", "stages", "warps", "smem"})
    headers = ["id", "backend", "q", "kv", "head_dim", "tile m x n", "stages", "warps", "smem"]
    table = Table(headers, right)
    for kernel in kernels:
        tile = kernel["tile"]
        table.add(
            kernel["id"],
            kernel["backend"],
            kernel["q_dtype"],
            kernel["kv_dtype"],
            head_dim(kernel),
            f"{tile['m']} x {tile['n']}",
            tile["stages"],
            tile["warps"],
            f"{kernel['smem_bytes'] / 1024:.0f} KiB" if kernel["smem_bytes"] else None,
        )
    return table
