"""Captured runs under many plans, streams and graphs; the rest is in tests/api.

One set of random tensors serves every batch, so that a plan costs no more than its lengths.
"""

import dataclasses
import functools
import itertools
import random
from typing import NamedTuple

import preflash
import pytest
import torch
from backends import captured, no_waits, on_every_backend, sleep
from preflash.testing import Case, Inputs, MaskKind, runner
from preflash.testing.inputs import indptr

pytestmark = pytest.mark.gpu

BATCH, ROWS, PAGES, PAGE = 7, 600, 512, 16
PAGED = Case("paged", (), (), 8, 2, 128, page_size=PAGE, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
FIXED = dataclasses.replace(PAGED, name="fixed", fixed_split_size=1024)
WHOLE = dataclasses.replace(RAGGED, name="whole", disable_split_kv=True)
WINDOW = dataclasses.replace(PAGED, name="window", window_left=100, head_dim=64)
NAN = float("nan")


class Lengths(NamedTuple):
    qo: tuple[int, ...]
    kv: tuple[int, ...]


def only(rows: int, keys: int) -> Lengths:
    """Returns the lengths of one request and empty ones."""
    return Lengths((rows, *(0,) * (BATCH - 1)), (keys, *(0,) * (BATCH - 1)))


FIRST = Lengths((500, 100, 0, 0, 0, 0, 0), (900, 100, 7, 0, 0, 300, 1))
DECODE = Lengths((1,) * 7, (3000, 5, 17, 900, 64, 0, 1200))
APPEND = Lengths((64, 1, 0, 33, 129, 5, 2), (512, 1, 77, 40, 129, 2000, 2))


class Pool:
    """Tensors that every batch shares, and a wrapper with use_cuda_graph=True on them."""

    def __init__(self, like: Case, backend: str) -> None:
        self.like = like
        generator = torch.Generator("cuda").manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(like.dtype)

        kv = (PAGES, PAGE, 2) if like.paged else (PAGES * PAGE, 2)
        self.q = normal(ROWS, like.num_qo_heads, like.head_dim)
        self.k, self.v = normal(*kv, like.head_dim), normal(*kv, like.dim_vo)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(ROWS, like.num_qo_heads, device="cuda")
        sizes = {"qo_indptr_buf": BATCH + 1, "kv_indptr_buf": BATCH + 1}
        if like.paged:
            sizes["paged_kv_indptr_buf"] = sizes.pop("kv_indptr_buf")
            sizes |= {"paged_kv_indices_buf": PAGES, "paged_kv_last_page_len_buf": BATCH}
        buffers = {
            name: torch.zeros(count, dtype=torch.int32, device="cuda")
            for name, count in sizes.items()
        }
        self.wrapper = runner.make_wrapper(
            like, backend=backend, device="cuda", use_cuda_graph=True, **buffers
        )

    def batch(self, lengths: Lengths, seed: int = 0) -> Inputs:
        """Returns a batch of the pool's own tensors and a random page table."""
        case = dataclasses.replace(self.like, qo_lens=lengths.qo, kv_lens=lengths.kv)
        q = self.q[: sum(lengths.qo)]
        inputs = Inputs(case, q, indptr(lengths.qo), indptr(lengths.kv), self.k, self.v)
        if not case.paged:
            return inputs
        counts = [-(-n // PAGE) for n in lengths.kv]
        pages = random.Random(seed).sample(range(PAGES), sum(counts))
        last = [(n - 1) % PAGE + 1 if n else 0 for n in lengths.kv]
        inputs.cache = (self.k, self.v)
        inputs.kv_indptr = indptr(counts)
        inputs.indices = torch.tensor(pages, dtype=torch.int32)
        inputs.last_page_len = torch.tensor(last, dtype=torch.int32)
        spans = itertools.pairwise(inputs.kv_indptr.tolist())
        inputs.page_table = [pages[begin:end] for begin, end in spans]
        return inputs

    def kv(self) -> tuple:
        return ((self.k, self.v),) if self.like.paged else (self.k, self.v)

    def plan(self, lengths: Lengths, seed: int = 0) -> Inputs:
        inputs = self.batch(lengths, seed)
        runner.plan(self.wrapper, inputs)
        return inputs

    def run(self, out=None, lse=None, rows: int | None = None, **options) -> None:
        part = slice(0, rows)
        out, lse = self._outputs(out, lse)
        outputs = {"out": out[part], "lse": lse[part], "return_lse": True}
        self.wrapper.run(self.q[part], *self.kv(), **outputs, **options)

    def _outputs(self, out, lse) -> tuple:
        return self.out if out is None else out, self.lse if lse is None else lse

    def capture(self, stream=None, **options) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        return captured(functools.partial(self.run, **options), stream)[0]

    def captured(self, lengths: Lengths = FIRST, **options) -> torch.cuda.CUDAGraph:
        """Plans, runs and captures."""
        self.plan(lengths)
        self.run()
        return self.capture(**options)

    def poison(self) -> None:
        self.out.fill_(NAN)
        self.lse.fill_(NAN)

    def check(self, inputs: Inputs, out=None, lse=None, **options) -> None:
        """Compares with the oracle; options: of the case that ran."""
        rows = inputs.q.shape[0]
        out, lse = self._outputs(out, lse)
        inputs = dataclasses.replace(inputs, case=dataclasses.replace(inputs.case, **options))
        runner.compare(inputs, out[:rows], lse[:rows]).check()


def parts(rng: random.Random, total: int, most_parts: int) -> tuple[int, ...]:
    """Returns numbers that add up to `total`, some of them 0."""
    cuts = sorted(rng.choices(range(total + 1), k=rng.randrange(most_parts)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
    sizes += [0] * (BATCH - len(sizes))
    rng.shuffle(sizes)
    return tuple(sizes)


def decode_lengths(rng: random.Random) -> Lengths:
    kv = parts(rng, rng.choice((30, 2000, 8000)), BATCH)
    return Lengths(tuple(rng.randint(0, 1) for _ in range(BATCH)), kv)


def any_lengths(rng: random.Random) -> Lengths:
    if rng.random() < 0.3:
        qo = tuple(rng.randint(0, 1) for _ in range(BATCH))
    else:
        qo = parts(rng, rng.choice((rng.randint(0, 40), rng.randint(0, ROWS))), BATCH)
    longest = (PAGES - BATCH) * PAGE
    kv = parts(rng, rng.choice((rng.randint(0, 300), rng.randint(0, longest))), BATCH)
    return Lengths(qo, kv)


LONGEST = Lengths(only(ROWS, 0).qo, (10,) * BATCH)
MANY_PLANS = {
    "paged": (PAGED, LONGEST, any_lengths, 1000, 50),
    "ragged": (RAGGED, LONGEST, any_lengths, 300, 50),
    "window": (WINDOW, LONGEST, any_lengths, 200, 50),
    "fixed": (FIXED, LONGEST, any_lengths, 300, 50),
    "whole": (WHOLE, LONGEST, any_lengths, 200, 50),
    # The first plan decides on short tiles; later plans split or not.
    "decode": (PAGED, DECODE, decode_lengths, 60, 1),
}


@on_every_backend
@pytest.mark.parametrize(
    ("like", "first", "lengths", "count", "step"), MANY_PLANS.values(), ids=MANY_PLANS
)
def test_many_plans_of_one_graph(backend, like, first, lengths, count, step):
    """Against an ordinary wrapper, bit for bit where the bits do not depend on the batch's split,
    and some against the oracle."""
    same_bits = like.disable_split_kv or like.fixed_split_size is not None
    pool = Pool(like, backend)
    graph = pool.captured(first)
    ordinary = runner.make_wrapper(like, backend=backend, device="cuda")
    rng = random.Random(5)
    for i in range(count):
        inputs = pool.plan(lengths(rng), seed=i)
        pool.poison()
        graph.replay()
        rows = inputs.q.shape[0]
        assert bool(pool.out[rows:].isnan().all())
        assert bool(pool.lse[rows:].isnan().all())
        if i % step == 0:
            pool.check(inputs)
        runner.plan(ordinary, inputs)
        out, lse = ordinary.run(inputs.q, *pool.kv(), return_lse=True)
        if same_bits:
            assert torch.equal(pool.out[:rows], out)
            assert torch.equal(pool.lse[:rows], lse)
        else:
            torch.testing.assert_close(pool.out[:rows], out, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(pool.lse[:rows], lse, rtol=1e-4, atol=1e-3)


@on_every_backend
def test_capture_plan_and_replay_on_streams_of_their_own(backend):
    pool = Pool(FIXED, backend)
    planning, capturing, replaying = (torch.cuda.Stream() for _ in range(3))
    planning.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(planning):
        pool.plan(FIRST)
        pool.run()
    graph = pool.capture(stream=capturing)
    for lengths in (DECODE, APPEND, FIRST):
        pool.poison()
        planning.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(planning):
            sleep(10)
            inputs = pool.plan(lengths)
        replaying.wait_stream(planning)
        with torch.cuda.stream(replaying):
            graph.replay()
        torch.cuda.current_stream().wait_stream(replaying)
        pool.check(inputs)


@on_every_backend
def test_plans_and_replays_back_to_back(backend):
    """The host is far ahead: every replay finds its own plan."""
    pool = Pool(PAGED, backend)
    graph = pool.captured()
    torch.cuda.synchronize()
    sleep(10)
    results = []
    for seed, lengths in enumerate((DECODE, APPEND, FIRST) * 4):
        inputs = pool.plan(lengths, seed)
        pool.poison()
        graph.replay()
        results.append((inputs, pool.out.clone(), pool.lse.clone()))
    for result in results:
        pool.check(*result)


@on_every_backend
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("runs_on_default", [False, True])
def test_a_plan_waits_for_runs_on_other_streams(backend, captured, runs_on_default):
    """plan() writes what runs read: the work list that a graph holds, and the page indices."""
    pool = Pool(PAGED, backend)
    if captured:
        pool.captured()
    before = pool.plan(APPEND, seed=3)
    pool.run()
    out, lse = torch.empty_like(pool.out), torch.empty_like(pool.lse)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream()]
    running, planning = reversed(streams) if runs_on_default else streams
    with torch.cuda.stream(running):
        sleep(100)
        pool.run(out, lse)
    with torch.cuda.stream(planning):
        after = pool.plan(DECODE, seed=4)
        pool.run()
    torch.cuda.synchronize()
    pool.check(before, out, lse)
    pool.check(after)


@on_every_backend
def test_options_that_only_a_capture_asks_for(backend):
    """forward() under capture with a window that no forward() had. What the graph frees before must
    not be where the work list is."""
    pool = Pool(PAGED, backend)

    def begin(lengths: Lengths, seed: int) -> Inputs:
        inputs = pool.batch(lengths, seed)
        table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        pool.wrapper.begin_forward(*table, 8, 2, 128, PAGE, q_data_type=PAGED.dtype)
        return inputs

    def forward():
        for size in (2 << 10, 64 << 10, 80 << 10, 1 << 20):
            torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        cache = (pool.k, pool.v)
        return pool.wrapper.forward_return_lse(pool.q, cache, causal=True, window_left=100)

    begin(FIRST, 0)
    pool.wrapper.forward(pool.q, (pool.k, pool.v), causal=True)
    torch.cuda.synchronize()
    graph, result = captured(forward)
    for seed, lengths in enumerate((FIRST, DECODE, APPEND)):
        inputs = begin(lengths, seed)
        result[0].fill_(NAN)
        graph.replay()
        pool.check(inputs, *result, window_left=100)


@on_every_backend
def test_options_that_captures_ask_for_on_any_stream(backend):
    """Torch has 32 streams and hands them out in turns: one of these is the wrapper's own."""
    streams = {stream.cuda_stream: stream for stream in (torch.cuda.Stream() for _ in range(64))}
    pool = Pool(PAGED, backend)
    for window_left, stream in enumerate(streams.values(), start=100):
        inputs = pool.plan(DECODE)
        pool.poison()
        pool.capture(stream, window_left=window_left).replay()
        pool.check(inputs, window_left=window_left)


@on_every_backend
def test_a_graph_for_every_number_of_rows(backend):
    """Engines capture one wrapper with q of many lengths, and replay the one that fits."""
    pool = Pool(PAGED, backend)
    graphs = {rows: pool.captured(only(rows, 600), rows=rows) for rows in (600, 300, 16)}
    for seed, lengths in enumerate((APPEND, DECODE, FIRST)):
        inputs = pool.plan(lengths, seed)
        rows = min(rows for rows in graphs if rows >= sum(lengths.qo))
        pool.poison()
        graphs[rows].replay()
        pool.check(inputs)


@on_every_backend
def test_a_plan_under_capture_is_refused(backend):
    pool = Pool(PAGED, backend)
    inputs = pool.plan(FIRST)
    pool.run()
    torch.cuda.synchronize()
    other = pool.batch(DECODE)
    with pytest.raises(RuntimeError, match="being captured"):
        captured(lambda: runner.plan(pool.wrapper, other))
    torch.cuda.synchronize()
    pool.poison()
    pool.run()
    pool.check(inputs)


@on_every_backend
def test_plan_does_not_wait(backend):
    """Arrays on the host: no synchronisation, with a graph's buffers as without."""
    pool = Pool(PAGED, backend)
    graph = pool.captured()
    inputs = [pool.batch(lengths, seed) for seed, lengths in enumerate((APPEND, DECODE, APPEND))]
    with no_waits():
        for batch in inputs:
            runner.plan(pool.wrapper, batch)
            graph.replay()
    pool.check(inputs[-1])


@on_every_backend
def test_a_fast_decode_plan_of_slots_does_not_wait(backend):
    """Plans as SGLang does: one-token pages on the GPU, and each request's page offsets on the
    host."""
    slots = torch.randperm(PAGES, dtype=torch.int32, device="cuda")
    begins = indptr((100, 0, 3, 200, 1))
    ones = torch.ones(5, dtype=torch.int32, device="cuda")
    k, v = (torch.randn(PAGES, 2, 128, device="cuda").half() for _ in range(2))
    q = torch.randn(5, 8, 128, device="cuda").half()
    results = []
    for on_host in (True, False):
        wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
            runner.workspace("cuda"), backend=backend
        )
        table = [begins, slots.cpu(), ones.cpu()] if on_host else [begins.cuda(), slots, ones]
        with no_waits():
            preflash.fast_decode_plan(
                wrapper, *table, 8, 2, 128, 1, global_override_indptr_cpu=begins
            )
        results.append(wrapper.run(q, (k, v)))
    assert torch.equal(*results)
