"""`python tests/fuzz --fuzz N` and `--problem TEXT`: random problems against the oracle."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from preflash.cli import CommandError
from preflash.cli.console import progress
from preflash.cli.machine import Place, choose_places

from . import problems, shrinking
from .calls import CALLS, WRAPPERS, Call
from .problems import Also, Problem
from .wrapper_trial import Verdict

_MOST_FAILURES = 5


@dataclass(frozen=True)
class Asked:
    """A problem, how it is computed, and the arguments that ask for it."""

    problem: Any
    call: Call
    arguments: str


@dataclass
class Tally:
    """Counts of the results of one place's problems."""

    passed: int = 0
    failed: int = 0
    not_compiled: int = 0
    refusal: str = ""  # the last one for what is not compiled
    worst: float = 0.0

    def count(self, verdict: Verdict) -> None:
        self.failed += bool(verdict.failures)
        self.not_compiled += bool(verdict.not_compiled)
        self.refusal = verdict.not_compiled or self.refusal
        self.passed += not verdict.failures and not verdict.not_compiled
        self.worst = max(self.worst, verdict.worst)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 a problem failed, 2 it could not run."""
    try:
        return _execute(_parser().parse_args(argv))
    except CommandError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz", description="Random problems against the float64 oracle."
    )
    parser.add_argument("--backend", help="on this backend alone: cpu, fa2, fa3")
    parser.add_argument(
        "--fuzz",
        type=int,
        metavar="N",
        help="N random problems, the same for the same seed and backend",
    )
    parser.add_argument(
        "--seed", metavar="S", help="with --fuzz: S, or S:I to begin with problem I"
    )
    parser.add_argument(
        "--call",
        choices=list(CALLS),
        default=WRAPPERS,
        help="with --fuzz: what the problems are for; the single functions and batch wrappers",
    )
    parser.add_argument(
        "--also",
        choices=[also.value for also in Also],
        help="with --fuzz, of the wrappers: what is looked at in every problem beside its numbers; "
        "problems in which it has no meaning are left out",
    )
    parser.add_argument("--problem", metavar="TEXT", help="a problem that --fuzz printed")
    return parser


def _check(args: argparse.Namespace) -> None:
    if args.fuzz is None and args.seed is not None:
        raise CommandError(f"--seed {args.seed}: it is for --fuzz; a problem has its own")
    if args.fuzz is None and args.call != WRAPPERS:
        raise CommandError(f"--call {args.call}: it is for --fuzz")
    if args.also is not None and (args.fuzz is None or args.call != WRAPPERS):
        raise CommandError(f"--also {args.also}: it is for --fuzz without --call")
    if (args.fuzz is None) == (args.problem is None):
        raise CommandError("--fuzz and --problem: give one of them")


def _execute(args: argparse.Namespace) -> int:
    _check(args)
    places = choose_places(args.backend)
    failed, refusals = 0, []
    for place in places:
        start = time.perf_counter()
        tally = _examine_all(place, _asked(args, place))
        seconds = time.perf_counter() - start
        failed += tally.failed
        if not tally.passed and not tally.failed:
            refusals.append(tally.refusal)
        print(
            f"{place.label}: {tally.passed} passed, {tally.failed} failed, "
            f"{tally.not_compiled} not compiled, largest error / allowed {tally.worst:.2f}, "
            f"{seconds:.1f} s"
        )
    if len(refusals) == len(places):
        raise CommandError(f"this build serves none of the problems: {refusals[-1]}")
    print("FAILED" if failed else "all good")
    return 1 if failed else 0


def _asked(args: argparse.Namespace, place: Place) -> list[Asked]:
    if args.problem is not None:
        try:
            problem = problems.parse(args.problem)
        except ValueError as error:
            raise CommandError(f"--problem: {error}") from error
        return [_spelled_out(problem)]
    if args.fuzz < 1:
        raise CommandError(f"--fuzz {args.fuzz}: must be at least 1")
    seed, first = _seed(args.seed or "0")
    call = CALLS[args.call]
    named = "" if args.call == WRAPPERS else f"--call {args.call} "
    if args.also is not None:
        named = f"--also {args.also} "
    drawn = (
        (_looked_at(call.draw(seed, index, place), args.also), index)
        for index in itertools.count(first)
    )
    return [
        Asked(problem, call, f"{named}--fuzz 1 --seed {seed}:{index}")
        for problem, index in itertools.islice((d for d in drawn if d[0] is not None), args.fuzz)
    ]


def _looked_at(problem: Any, also: str | None) -> Any:
    """The problem with `also` looked at; None where that has no meaning in it."""
    if also is None:
        return problem
    try:
        return dataclasses.replace(problem, also=Also(also))
    except ValueError:
        return None


def _spelled_out(problem: Problem) -> Asked:
    return Asked(problem, CALLS[WRAPPERS], f"--problem {shlex.quote(problem.text)}")


def _seed(text: str) -> tuple[int, int]:
    """The seed and the index of the first problem in S or S:I."""
    seed, _, first = text.partition(":")
    try:
        found = int(seed), int(first or 0)
    except ValueError:
        raise CommandError(f"--seed {text}: must be S or S:I, two integers") from None
    if found[1] < 0:
        raise CommandError(f"--seed {text}: problems are counted from 0")
    return found


def _examine_all(place: Place, asked: Sequence[Asked]) -> Tally:
    tally = Tally()
    with progress(len(asked), "fuzz") as step:
        for one in asked:
            verdict = one.call.examine(one.problem, place)
            tally.count(verdict)
            if verdict.failures:
                _report(one, verdict, place)
            if _lost(place):
                print(f"stopped: {place.label} answers nothing after this")
                break
            if tally.failed == _MOST_FAILURES:
                print(f"stopped after {_MOST_FAILURES} failures")
                break
            step(place.label)
    return tally


def _lost(place: Place) -> bool:
    """True if the GPU has had a fault that leaves this process without it."""
    if place.device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(place.device)
    except RuntimeError:
        return True
    return False


def _report(asked: Asked, verdict: Verdict, place: Place) -> None:
    """The command that computes the problem again, what is wrong, and the same of a small one."""
    _print_failure("FAILED", asked, verdict, place)
    # A lost GPU fails every other problem, too.
    if _lost(place) or not isinstance(asked.problem, Problem):
        return
    examine = asked.call.examine
    smaller = shrinking.shrink(asked.problem, lambda other: bool(examine(other, place).failures))
    if smaller != asked.problem:
        _print_failure("smaller:", _spelled_out(smaller), examine(smaller, place), place)


def _print_failure(title: str, asked: Asked, verdict: Verdict, place: Place) -> None:
    print(f"{title} python tests/fuzz --backend {place.backend} {asked.arguments}")
    for failure in verdict.failures:
        print(f"    {failure}", flush=True)
