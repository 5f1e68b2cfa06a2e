"""The command line. Each command is a module with `configure(parser)` and `execute(args)`, which
returns the exit code. A module is imported only when its command is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "info": "version, libraries, GPUs, CPU, and what backend='auto' picks here and why",
    "variants": "the compiled kernel matrix",
    "check": "short self-test of every backend of this machine against a float64 oracle",
    "bench": "speed table against torch's scaled_dot_product_attention, one run",
    "demo": "the main job: paged batch prefill, planned once and run for many layers, verified",
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m preflash", description="Prebuilt flash attention for prefill and append."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in _COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=f"preflash {name}: {summary}.")
        if name == command:
            importlib.import_module(f"preflash.cli.{name}").configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 fine, 1 a check failed, 2 it could not run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv and argv[0] in _COMMANDS else None
    args = _parser(command).parse_args(argv)
    try:
        return importlib.import_module(f"preflash.cli.{args.command}").execute(args)
    except CommandError as error:
        print(f"preflash {args.command}: {error}", file=sys.stderr)
        return 2


class CommandError(Exception):
    """The command cannot run as asked; the message names the option and what would work."""
