"""Smaller problems that fail as a larger one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .problems import Also, Problem

_LENGTHS = ("qo_lens", "kv_lens")


def shrink(problem: Problem, fails: Callable[[Problem], bool], tries: int = 250) -> Problem:
    """Returns a smaller problem that fails too, the first that does among ordered candidates."""
    candidates = _simpler(problem)
    for _ in range(tries):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            problem, candidates = candidate, _simpler(candidate)
    return problem


def _simpler(problem: Problem) -> Iterator[Problem]:
    for change in _changes(problem):
        try:
            parts = {name: _changed(getattr(problem, name), change) for name in ("case", "call")}
            candidate = _changed(problem, change | parts)
        except ValueError:  # the rest of the problem needs what was taken away
            continue
        if candidate != problem:
            yield candidate


def _changed(part, change: dict[str, object]):
    """Returns the problem, case or call with other values of those fields that it has."""
    names = {field.name for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{name: change[name] for name in names & change.keys()})


def _changes(problem: Problem) -> Iterator[dict[str, object]]:
    case = problem.case
    count = case.batch_size
    requests = [*zip(case.qo_lens, case.kv_lens, strict=True)]
    fewer = [requests[: count // 2], requests[count // 2 :]] if count > 2 else []
    fewer += [requests[:i] + requests[i + 1 :] for i in range(count if count > 1 else 0)]
    for rest in fewer:
        yield dict(zip(_LENGTHS, zip(*rest, strict=True), strict=True))
    for name in _LENGTHS:
        yield {name: tuple(n // 2 for n in getattr(case, name))}
    for name in _LENGTHS:
        lens = getattr(case, name)
        for i, n in enumerate(lens):
            for less in sorted({n // 2, n - n // 4, n - 1} - {n, -1}):
                yield {name: (*lens[:i], less, *lens[i + 1 :])}
    if case.group_size > 1:
        yield {"num_qo_heads": case.num_kv_heads}
        yield {"num_qo_heads": case.num_kv_heads * (case.group_size // 2)}
    if case.num_kv_heads > 1:
        yield {"num_qo_heads": case.group_size, "num_kv_heads": 1}
    for dim in (8, 64, 128):
        if dim < case.head_dim:
            yield {"head_dim": dim, "head_dim_vo": None}
    required = ("name", *_LENGTHS, "num_qo_heads", "num_kv_heads", "head_dim", "dtype")
    for part in (problem.case, problem.call):
        for option in dataclasses.fields(part):
            if option.name not in required:
                yield {option.name: option.default}
    yield {"also": Also.NOTHING}
