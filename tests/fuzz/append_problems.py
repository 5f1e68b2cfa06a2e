"""Problems for append_paged_kv_cache. Nothing is rounded there: every bit of a pool, and of what
lies around it, is as a loop over tokens leaves it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import preflash
import torch
from preflash.testing import inputs
from preflash.testing.case import Case, KvForm
from preflash.testing.inputs import SPARE_PAGES

from .guarded import bits
from .random_cases import Limits, random_case
from .wrapper_trial import Verdict, judged


@dataclasses.dataclass(frozen=True)
class AppendProblem:
    """`case.qo_lens` tokens are appended to requests, which then have `case.kv_lens`."""

    case: Case
    index_dtype: torch.dtype
    padding: tuple[int, int]  # tokens that no request has, before and behind the others
    own_positions: bool  # found by get_batch_indices_positions
    seed: int


def draw(seed: int, index: int, limits: Limits) -> AppendProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"append {seed} {index}")
    case = random_case(rng, "problem", limits)
    pairs = zip(case.qo_lens, case.kv_lens, strict=True)
    appended = tuple(min(qo_len, kv_len) for qo_len, kv_len in pairs)
    page_size = case.page_size or rng.choice([1, 5, 16, 64])
    case = dataclasses.replace(case, qo_lens=appended, page_size=page_size)
    return AppendProblem(
        case,
        index_dtype=rng.choice([torch.int32, torch.int64]),
        padding=(rng.choice([0, 0, 3]), rng.choice([0, 0, 5])),
        own_positions=rng.random() < 0.5,
        seed=rng.randrange(2**31),
    )


@judged
def examine(problem: AppendProblem, backend: str, device: torch.device) -> Verdict:
    """Appends and compares with a loop. `device` alone decides what runs; backend="cpu" makes a
    missing kernel a failure."""
    appended = _Append(problem)
    wanted = appended.by_a_loop()
    failures = []
    places = [_array(problem, values, device) for values in (appended.owners, appended.positions)]
    if problem.own_positions:
        found = _found_places(problem, device)
        if any(a.tolist() != b.tolist() for a, b in zip(found, places, strict=True)):
            failures.append("get_batch_indices_positions() differs from a loop")
        places = found
    pools = _Pools(problem, device)
    preflash.append_paged_kv_cache(
        *(values.to(device) for values in appended.rows),
        *places,
        (pools.k, pools.v) if pools.both is None else pools.both,
        **{name: _array(problem, values, device) for name, values in appended.table.items()},
        kv_layout=problem.case.layout,
    )
    for name in "kv":
        got, want = (_bytes(getattr(one, name)) for one in (pools, wanted))
        if changed := int((got.cpu() != want).sum()):
            failures.append(f"the memory of {name}: {changed} bytes differ from a loop's")
    return Verdict(failures)


class _Pools:
    """K and V pools of garbage, the same whenever they are made."""

    def __init__(self, problem: AppendProblem, device: torch.device | str) -> None:
        case = problem.case
        generator = torch.Generator().manual_seed(problem.seed)
        count = sum(_pages_of(case)) + SPARE_PAGES
        leading = (count,) if case.form is KvForm.FLAT else (count, case.page_size)
        self.k, self.v, self.both = inputs.storage(case, leading, generator, device)


class _Append:
    """Tokens to append, with their requests, positions and page table."""

    def __init__(self, problem: AppendProblem) -> None:
        self._problem, case = problem, problem.case
        generator = torch.Generator().manual_seed(problem.seed + 1)
        counts = _pages_of(case)
        pages = torch.randperm(sum(counts) + SPARE_PAGES, generator=generator).tolist()
        indptr = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self._pages = [pages[begin:end] for begin, end in itertools.pairwise(indptr)]
        before, behind = problem.padding
        tokens = before + sum(case.qo_lens) + behind
        self.rows = [
            _random_bits((tokens, case.num_kv_heads, dim), case.dtype_kv, generator)
            for dim in (case.head_dim, case.dim_vo)
        ]
        self.owners, self.positions = [-1] * before, [0] * before
        for request, (new, length) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
            self.owners += [request] * new
            self.positions += range(length - new, length)
        self.owners += [-1] * behind
        self.positions += [0] * behind
        self.table = {
            "kv_indices": [*pages[: indptr[-1]], 2**31 - 1],
            "kv_indptr": indptr,
            "kv_last_page_len": [(n - 1) % case.page_size + 1 if n else -5 for n in case.kv_lens],
        }

    def by_a_loop(self) -> _Pools:
        case, pools = self._problem.case, _Pools(self._problem, "cpu")
        for token, (owner, position) in enumerate(zip(self.owners, self.positions, strict=True)):
            if owner < 0:
                continue
            page, slot = self._pages[owner][position // case.page_size], position % case.page_size
            for pool, rows in ((pools.k, self.rows[0]), (pools.v, self.rows[1])):
                place = (page, slot) if case.layout == "NHD" else (page, slice(None), slot)
                bits(pool)[(page,) if case.form is KvForm.FLAT else place] = bits(rows)[token]
        return pools


def _pages_of(case: Case) -> list[int]:
    return [-(-n // case.page_size) for n in case.kv_lens]


def _random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Every pattern of bits, NaN with a payload included."""
    wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, wide, generator=generator, dtype=torch.uint8).view(dtype)


def _array(problem: AppendProblem, values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=problem.index_dtype, device=device)


def _found_places(problem: AppendProblem, device: torch.device) -> tuple[torch.Tensor, ...]:
    case, (before, behind) = problem.case, problem.padding
    indptr = list(itertools.accumulate(case.qo_lens, initial=before))
    return preflash.get_batch_indices_positions(
        _array(problem, indptr, device),
        _array(problem, list(case.kv_lens), device),
        indptr[-1] + behind,
    )


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The whole memory that it is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
