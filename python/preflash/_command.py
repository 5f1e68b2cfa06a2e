"""The start of the command line: whether it starts here, its commands and their options.

NOTE: imports nothing that imports torch. Help, the version and usage errors are answered before
torch, which takes seconds to import.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from . import _core

_DTYPES = "bf16, f16 or f32, or bfloat16, float16, float32"
_FILE = {"metavar": "FILE", "type": pathlib.Path}


def is_starting() -> bool:
    """Returns true if this import of preflash starts `python -m preflash` or the script `preflash`.

    While `python -m` locates its module, which imports the package, sys.argv[0] is "-m" (Python's
    documentation of -m); sys.orig_argv then names the module just before the arguments that follow
    in sys.argv. The script `preflash` is installed beside the interpreter that runs it; where pip
    installs it elsewhere (--user), this returns false and `--help` takes as long as torch's import.
    """
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":
        return sys.orig_argv[-len(sys.argv) :][:1] == ["preflash"]
    if os.path.basename(program) != "preflash" or not sys.executable:
        return False
    folders = (pathlib.Path(file).parent for file in (os.path.realpath(program), sys.executable))
    return len({folder.resolve() for folder in folders}) == 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of a command. Exits after --help, --version and, with code 2, a usage
    error; without any argument after the help."""
    if sys.stderr is None:  # closed by the shell (2>&-); None would send messages to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, for as long as the process lives
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        parser.exit()
    return args


def _parser() -> argparse.ArgumentParser:
    is_script = os.path.basename(sys.argv[0]) == "preflash"
    parser = argparse.ArgumentParser(
        prog="preflash" if is_script else "python -m preflash",
        description="Prebuilt attention kernels for LLM inference.",
    )
    version = f"preflash {_core.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print it and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (summary, configure) in _COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=f"preflash {name}: {summary}.")
        configure(sub)
    return parser


def _info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def _variants(parser: argparse.ArgumentParser) -> None:
    families = [f"{f.name} ({_core.traits_of(f).backend})" for f in _core.families()]
    parser.add_argument("--family", help=f"or its backend: {', '.join(families)}")
    parser.add_argument("--dtype", help=f"of q: {_DTYPES}; e4m3 or float8_e4m3fn")
    parser.add_argument("--head-dim", help="what serves it: 64, 128, 192x128, ...")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", help="check this backend alone: cpu, fa2, fa3")
    parser.add_argument("--quick", action="store_true", help="one dtype per backend")


def _bench(parser: argparse.ArgumentParser) -> None:
    named = "only rows whose name contains this; or one of several with commas"
    parser.add_argument("--rows", default="", help=named)
    parser.add_argument("--backend", help="cpu, fa2 or fa3; by default the fastest on this machine")
    parser.add_argument("--dtype", help=f"{_DTYPES}; or several with commas")
    parser.add_argument("--json", **_FILE, help="write results to FILE")
    parser.add_argument(
        "--plot",
        **_FILE,
        help="draw the rows named dense and decode into FILE.png, .svg or .pdf (pip install "
        "'preflash[trace]'); with --compare, those of both reports",
    )
    parser.add_argument(
        "--compare",
        metavar=("A.json", "B.json"),
        nargs=2,
        type=pathlib.Path,
        help="measure nothing: how much faster report B is than report A, row by row",
    )
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _demo(parser: argparse.ArgumentParser) -> None:
    auto = "by default auto, which picks one for each batch"
    parser.add_argument("--backend", help=f"cpu, fa2 or fa3; {auto}")
    parser.add_argument("--quick", action="store_true", help="two layers, short requests")
    embed = "embed and search the lines of a text instead, real weights"
    parser.add_argument("--text", metavar="FILE", help=embed)
    parser.add_argument("--find", metavar="WORDS", help="what to search for; the first line")


def _config(parser: argparse.ArgumentParser) -> None:
    for option, what in {
        "cflags": "where preflash/preflash.h is",
        "libs": "how to link with libpreflash.so",
        "libdir": "the directory of libpreflash.so",
        "includedir": "the directory of preflash/preflash.h",
    }.items():
        parser.add_argument(f"--{option}", action="store_true", help=what)


_COMMANDS = {
    "info": ("version, libraries, GPUs, CPU, and what backend='auto' picks here and why", _info),
    "variants": ("the compiled kernel matrix", _variants),
    "check": ("short self-test of every backend of this machine against a float64 oracle", _check),
    "bench": ("speed table against torch's scaled_dot_product_attention, one run", _bench),
    "demo": (
        "the main job: paged batch prefill, planned once and run for many layers, verified",
        _demo,
    ),
    "config": ("options for a C compiler; by default --cflags --libs", _config),
}
