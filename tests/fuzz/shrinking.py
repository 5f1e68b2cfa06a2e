"""Smaller problems that fail as a larger one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from preflash.testing.case import Case

from .problems import Also, Problem

_TRIES = 250


def shrink(problem: Problem, fails: Callable[[Problem], bool]) -> Problem:
    """A smaller problem that fails too: fewer and shorter requests, options at their defaults.

    The same for the same problem: candidates have an order, and the first that fails is taken.
    """
    tries = 0
    while True:
        for candidate in _simpler(problem):
            if tries == _TRIES:
                return problem
            tries += 1
            if fails(candidate):
                problem = candidate
                break
        else:
            return problem


def _simpler(problem: Problem) -> Iterator[Problem]:
    for change in _changes(problem):
        try:
            candidate = _changed(problem, change)
        except ValueError:  # the rest of the problem needs what was taken away
            continue
        if candidate != problem:
            yield candidate


def _changed(problem: Problem, change: dict[str, object]) -> Problem:
    """The problem with other values of fields of itself, its case or its call."""

    def of(part) -> dict[str, object]:
        names = {field.name for field in dataclasses.fields(part)}
        return {name: value for name, value in change.items() if name in names}

    case = dataclasses.replace(problem.case, **of(problem.case))
    call = dataclasses.replace(problem.call, **of(problem.call))
    return dataclasses.replace(problem, case=case, call=call, **of(problem))


def _changes(problem: Problem) -> Iterator[dict[str, object]]:
    case = problem.case
    yield from _fewer_requests(case)
    yield from _shorter(case)
    if case.group_size > 1:
        yield {"num_qo_heads": case.num_kv_heads}
        yield {"num_qo_heads": case.num_kv_heads * (case.group_size // 2)}
    if case.num_kv_heads > 1:
        yield {"num_qo_heads": case.group_size, "num_kv_heads": 1}
    for dim in (8, 64, 128):
        if dim < case.head_dim:
            yield {"head_dim": dim, "head_dim_vo": None}
    required = ("name", "qo_lens", "kv_lens", "num_qo_heads", "num_kv_heads", "head_dim", "dtype")
    for part in (problem.case, problem.call):
        for option in dataclasses.fields(part):
            if option.name not in required:
                yield {option.name: option.default}
    yield {"also": Also.NOTHING}


def _fewer_requests(case: Case) -> Iterator[dict[str, object]]:
    count = case.batch_size
    if count > 2:
        for part in (slice(0, count // 2), slice(count // 2, None)):
            yield {"qo_lens": case.qo_lens[part], "kv_lens": case.kv_lens[part]}
    if count > 1:
        for i in range(count):
            qo_lens, kv_lens = (lens[:i] + lens[i + 1 :] for lens in (case.qo_lens, case.kv_lens))
            yield {"qo_lens": qo_lens, "kv_lens": kv_lens}


def _shorter(case: Case) -> Iterator[dict[str, object]]:
    for name in ("qo_lens", "kv_lens"):
        yield {name: tuple(n // 2 for n in getattr(case, name))}
    for name in ("qo_lens", "kv_lens"):
        lens = getattr(case, name)
        for i, n in enumerate(lens):
            for less in sorted({n // 2, n - n // 4, n - 1} - {n}):
                if less >= 0:
                    yield {name: (*lens[:i], less, *lens[i + 1 :])}
