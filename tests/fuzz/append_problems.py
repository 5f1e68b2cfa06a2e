"""Problems for append_paged_kv_cache. Nothing is rounded there: every bit of a pool, and of what
lies around it, is as a loop over tokens leaves it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import preflash
import torch
from preflash.testing.case import Case
from preflash.testing.inputs import Inputs, build, pages_of

from .guarded import bits, memory_of
from .random_cases import Limits, random_case, with_defaults
from .wrapper_trial import Verdict, add_garbage, judged


@dataclasses.dataclass(frozen=True)
class AppendProblem:
    """`case.qo_lens` tokens are appended to requests, which then have `case.kv_lens`."""

    case: Case
    index_dtype: torch.dtype
    padding: tuple[int, int]  # tokens that no request has, before and behind the others
    own_positions: bool  # found by get_batch_indices_positions
    seed: int

    def array(self, values, device: torch.device) -> torch.Tensor:
        return torch.as_tensor(values).to(device, self.index_dtype)


def draw(seed: int, index: int, limits: Limits) -> AppendProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"append {seed} {index}")
    case = with_defaults(random_case(rng, "problem", limits), ["mask", "sinks", "head_scales"])
    appended = tuple(map(min, case.qo_lens, case.kv_lens))
    page_size = case.page_size or rng.choice([1, 5, 16, 64])
    return AppendProblem(
        dataclasses.replace(case, qo_lens=appended, page_size=page_size),
        index_dtype=rng.choice([torch.int32, torch.int64]),
        padding=(rng.choice([0, 0, 3]), rng.choice([0, 0, 5])),
        own_positions=rng.random() < 0.5,
        seed=rng.randrange(2**31),
    )


@judged
def examine(problem: AppendProblem, backend: str, device: torch.device) -> Verdict:
    """Appends and compares with a loop. `device` alone decides what runs; backend="cpu" makes a
    missing kernel a failure."""
    case, failures = problem.case, []
    made, wanted = (build(case, device=where, seed=problem.seed) for where in (device, "cpu"))
    owners, positions = _places(problem)
    generator = torch.Generator().manual_seed(problem.seed + 1)
    shapes = ((len(owners), case.num_kv_heads, d) for d in (case.head_dim, case.dim_vo))
    rows = [_random_bits(shape, case.dtype_kv, generator) for shape in shapes]
    _append_by_a_loop(wanted, rows, owners, positions)
    places = [problem.array(values, device) for values in (owners, positions)]
    if problem.own_positions:
        indptr = list(itertools.accumulate(case.qo_lens, initial=problem.padding[0]))
        lengths = problem.array(case.kv_lens, device)
        found = preflash.get_batch_indices_positions(
            problem.array(indptr, device), lengths, len(owners)
        )
        if any(a.tolist() != b.tolist() for a, b in zip(found, places, strict=True)):
            failures.append("get_batch_indices_positions() differs from a loop")
        places = found
    add_garbage(made)
    preflash.append_paged_kv_cache(
        *(values.to(device) for values in rows),
        *places,
        made.cache,
        kv_indices=problem.array(made.indices, device),
        kv_indptr=problem.array(made.kv_indptr, device),
        kv_last_page_len=problem.array(made.last_page_len, device),
        kv_layout=case.layout,
    )
    for name in "kv":
        got, want = (memory_of(getattr(one, name)).cpu() for one in (made, wanted))
        if changed := int((got != want).sum()):
            failures.append(f"the memory of {name}: {changed} bytes differ from a loop's")
    return Verdict(failures)


def _places(problem: AppendProblem) -> tuple[list[int], list[int]]:
    """The request and the position of every token; -1 and 0 of those that no request has."""
    case, (before, behind) = problem.case, problem.padding
    owners, positions = [-1] * before, [0] * before
    for request, (new, length) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
        owners += [request] * new
        positions += range(length - new, length)
    return owners + [-1] * behind, positions + [0] * behind


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator) -> torch.Tensor:
    """Every pattern of bits, NaN with a payload included."""
    wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, wide, generator=generator, dtype=torch.uint8).view(dtype)


def _append_by_a_loop(inputs: Inputs, rows, owners: list[int], positions: list[int]) -> None:
    size = inputs.case.page_size
    pools = [bits(pages_of(pool, inputs.case)) for pool in (inputs.k, inputs.v)]
    for token, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        if owner >= 0:
            page = inputs.page_table[owner][position // size]
            for pool, new in zip(pools, rows, strict=True):
                pool[page, position % size] = bits(new)[token]
