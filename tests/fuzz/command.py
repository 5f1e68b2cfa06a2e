"""`python tests/fuzz --fuzz N` and `--problem TEXT`: random problems against the oracle."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from preflash.cli import CommandError
from preflash.cli.console import progress
from preflash.cli.machine import Place, choose_places

from . import cudnn_trial, fmha_problems, pod_trial, problems, shrinking, wrapper_trial
from .problems import Also, Problem
from .random_cases import Limits
from .wrapper_trial import Verdict

WRAPPERS = "wrappers"
# By name draw(seed, index, limits) and examine(problem, backend=, device=).
CALLS = {
    WRAPPERS: (problems.draw, wrapper_trial.examine),
    "trtllm_fmha_v2_prefill": (fmha_problems.draw, fmha_problems.examine),
    "pod": (pod_trial.draw, pod_trial.examine),
    "cudnn_batch_prefill_with_kv_cache": (cudnn_trial.draw, cudnn_trial.examine),
}


@dataclass(frozen=True)
class Effort:
    """Size of a search: work of a problem, failures that end it, candidates for a smaller one."""

    work: float = 2e7  # milliseconds in the oracle; several tiles, splits and requests
    failures: int = 5
    tries: int = 250


def main(argv: Sequence[str] | None = None, effort: Effort = Effort()) -> int:
    """Returns the exit code: 0 fine, 1 a problem failed, 2 it could not run."""
    try:
        return _execute(_parser().parse_args(argv), effort)
    except CommandError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    about = "Random problems against the float64 oracle."
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=about)
    parser.add_argument("--backend", help="on this backend alone: cpu, fa2, fa3")
    help_fuzz = "N random problems, the same for the same seed and backend"
    parser.add_argument("--fuzz", type=int, metavar="N", help=help_fuzz)
    help_seed = "with --fuzz: S, or S:I to begin with problem I"
    parser.add_argument("--seed", metavar="S", help=help_seed)
    help_call = "with --fuzz: what the problems are for; by default the wrappers for prefill"
    parser.add_argument("--call", choices=list(CALLS), default=WRAPPERS, help=help_call)
    help_also = "with --fuzz: a check of every problem of the wrappers in which it has a meaning"
    parser.add_argument("--also", choices=[also.value for also in Also], help=help_also)
    parser.add_argument("--problem", metavar="TEXT", help="a problem that --fuzz printed")
    return parser


def _execute(args: argparse.Namespace, effort: Effort) -> int:
    if (args.fuzz is None) == (args.problem is None):
        raise CommandError("--fuzz and --problem: give one of them")
    if args.fuzz is None and (args.seed is not None or args.call != WRAPPERS):
        raise CommandError("--seed and --call are for --fuzz")
    if args.also is not None and (args.fuzz is None or args.call != WRAPPERS):
        raise CommandError(f"--also {args.also}: it is for --fuzz without --call")
    if args.fuzz is not None and args.fuzz < 1:
        raise CommandError(f"--fuzz {args.fuzz}: must be at least 1")
    places = choose_places(args.backend)
    failed, refusals = 0, []
    for place in places:
        start = time.perf_counter()
        limits = Limits(700, effort.work, place.dtypes)
        search = _Search(place, args.call, effort)
        search.run(_problems(args, limits), args.fuzz or 1)
        seconds = time.perf_counter() - start
        failed += search.failed
        if not search.passed and not search.failed:
            refusals.append(search.refusal)
        print(
            f"{place.label}: {search.passed} passed, {search.failed} failed, "
            f"{search.not_compiled} not compiled, largest error / allowed {search.worst:.2f}, "
            f"{seconds:.1f} s"
        )
    if len(refusals) == len(places):
        raise CommandError(f"this build serves none of the problems: {refusals[-1]}")
    print("FAILED" if failed else "all good")
    return 1 if failed else 0


def _problems(args: argparse.Namespace, limits: Limits) -> Iterator[tuple[Any, str]]:
    """Yields problems, each with the arguments that ask for it."""
    if args.problem is not None:
        try:
            problem = problems.parse(args.problem)
        except ValueError as error:
            raise CommandError(f"--problem: {error}") from error
        yield problem, _spelled_out(problem)
        return
    seed = args.seed or "0"
    if not re.fullmatch(r"-?\d+(:\d+)?", seed):
        raise CommandError(f"--seed {seed}: must be S or S:I, two integers, I at least 0")
    seed, first = (int(part or 0) for part in seed.partition(":")[::2])
    draw, _ = CALLS[args.call]
    options = "" if args.call == WRAPPERS else f"--call {args.call} "
    if args.also is not None:
        options = f"--also {args.also} "
    for index in itertools.count(first):
        problem = draw(seed, index, limits)
        try:
            if args.also is not None:
                problem = dataclasses.replace(problem, also=Also(args.also))
        except ValueError:  # the check has no meaning in it
            continue
        yield problem, f"{options}--fuzz 1 --seed {seed}:{index}"


def _spelled_out(problem: Problem) -> str:
    return f"--problem {shlex.quote(problem.text)}"


@dataclass
class _Search:
    """A search for failing problems of a call at one place, with counts of its results."""

    place: Place
    call: str
    effort: Effort
    passed: int = 0
    failed: int = 0
    not_compiled: int = 0
    refusal: str = ""  # the last one for what is not compiled
    worst: float = 0.0

    def run(self, asked: Iterator[tuple[Any, str]], count: int) -> None:
        """Computes the first `count` problems, and prints commands for those that fail."""
        with progress(count, "fuzz") as step:
            for problem, arguments in itertools.islice(asked, count):
                verdict = self._examine(problem)
                self._count(verdict)
                if verdict.failures:
                    self._print("FAILED", arguments, verdict)
                if self._is_lost():
                    print(f"stopped: {self.place.label} answers nothing after this")
                    break
                if verdict.failures and self.call == WRAPPERS:
                    self._print_smaller(problem)
                if self.failed == self.effort.failures:
                    print(f"stopped after {self.failed} failures")
                    break
                step(self.place.label)

    def _examine(self, problem: Any) -> Verdict:
        _, examine = CALLS[self.call]
        return examine(problem, backend=self.place.backend, device=self.place.device)

    def _count(self, verdict: Verdict) -> None:
        self.failed += bool(verdict.failures)
        self.not_compiled += bool(verdict.not_compiled)
        self.refusal = verdict.not_compiled or self.refusal
        self.passed += not verdict.failures and not verdict.not_compiled
        self.worst = max(self.worst, verdict.worst)

    def _is_lost(self) -> bool:
        """True if the GPU has had a fault that leaves this process without it."""
        try:
            self.place.synchronize()
        except RuntimeError:
            return True
        return False

    def _print_smaller(self, problem: Problem) -> None:
        def fails(other: Problem) -> bool:
            return bool(self._examine(other).failures)

        smaller = shrinking.shrink(problem, fails, self.effort.tries)
        if smaller != problem:
            self._print("smaller:", _spelled_out(smaller), self._examine(smaller))

    def _print(self, title: str, arguments: str, verdict: Verdict) -> None:
        print(f"{title} python tests/fuzz --backend {self.place.backend} {arguments}")
        for failure in verdict.failures:
            print(f"    {failure}", flush=True)
