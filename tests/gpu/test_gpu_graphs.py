"""Captured runs under many plans, streams and graphs; the rest is in tests/api.

One set of random tensors serves every batch, so that a plan costs no more than its lengths.
"""

import contextlib
import dataclasses
import functools
import itertools
import random
from typing import NamedTuple

import preflash
import pytest
import torch
from backends import captured, on_every_backend
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


FIRST = Lengths((500, 100, 0, 0, 0, 0, 0), (900, 100, 7, 0, 0, 300, 1))
DECODE = Lengths((1,) * 7, (3000, 5, 17, 900, 64, 0, 1200))
APPEND = Lengths((64, 1, 0, 33, 129, 5, 2), (512, 1, 77, 40, 129, 2000, 2))


class Pool:
    """Tensors that every batch shares, and a wrapper with use_cuda_graph=True on them."""

    def __init__(self, like: Case, backend: str, workspace=None) -> None:
        self.like, self.backend = like, backend
        generator = torch.Generator("cuda").manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(like.dtype)

        kv = (PAGES, PAGE, 2) if like.paged else (PAGES * PAGE, 2)
        self.q = normal(ROWS, like.num_qo_heads, like.head_dim)
        self.k, self.v = normal(*kv, like.head_dim), normal(*kv, like.dim_vo)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(ROWS, like.num_qo_heads, device="cuda")
        self.wrapper = self._wrapper(like, backend, workspace)

    @staticmethod
    def _wrapper(like: Case, backend: str, workspace):
        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device="cuda")

        workspace = runner.workspace("cuda") if workspace is None else workspace
        options = {"use_cuda_graph": True, "qo_indptr_buf": ints(BATCH + 1), "backend": backend}
        if not like.paged:
            kind = preflash.BatchPrefillWithRaggedKVCacheWrapper
            return kind(workspace, kv_indptr_buf=ints(BATCH + 1), **options)
        return preflash.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            paged_kv_indptr_buf=ints(BATCH + 1),
            paged_kv_indices_buf=ints(PAGES),
            paged_kv_last_page_len_buf=ints(BATCH),
            **options,
        )

    def batch(self, lengths: Lengths, seed: int = 0) -> Inputs:
        """Batch of the pool's own tensors; the page table is a random part of the pool."""
        case = dataclasses.replace(self.like, qo_lens=lengths.qo, kv_lens=lengths.kv)
        inputs = Inputs(
            case=case,
            q=self.q[: sum(lengths.qo)],
            qo_indptr=indptr(lengths.qo),
            kv_indptr=indptr(lengths.kv),
            k=self.k,
            v=self.v,
        )
        if not case.paged:
            return inputs
        counts = [-(-n // PAGE) for n in lengths.kv]
        pages = random.Random(seed).sample(range(PAGES), sum(counts))
        spans = itertools.pairwise(indptr(counts).tolist())
        inputs.cache = (self.k, self.v)
        inputs.kv_indptr = indptr(counts)
        inputs.indices = torch.tensor(pages, dtype=torch.int32)
        inputs.last_page_len = torch.tensor(
            [(n - 1) % PAGE + 1 if n else 0 for n in lengths.kv], dtype=torch.int32
        )
        inputs.page_table = [pages[begin:end] for begin, end in spans]
        return inputs

    def kv(self) -> tuple:
        return ((self.k, self.v),) if self.like.paged else (self.k, self.v)

    def plan(self, lengths: Lengths, seed: int = 0, **overrides) -> Inputs:
        inputs = self.batch(lengths, seed)
        runner.plan(self.wrapper, inputs, **overrides)
        return inputs

    def run(self, out=None, lse=None, rows: int | None = None) -> None:
        out = self.out if out is None else out
        lse = self.lse if lse is None else lse
        part = slice(0, rows)
        self.wrapper.run(self.q[part], *self.kv(), out=out[part], lse=lse[part], return_lse=True)

    def capture(self, stream=None, **options) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        return captured(lambda: self.run(**options), stream)[0]

    def captured(self, lengths: Lengths = FIRST, **options) -> torch.cuda.CUDAGraph:
        self.plan(lengths)
        self.run()
        return self.capture(**options)

    def poison(self) -> None:
        self.out.fill_(NAN)
        self.lse.fill_(NAN)

    def check(self, inputs: Inputs, out=None, lse=None) -> None:
        rows = inputs.q.shape[0]
        out = self.out if out is None else out
        lse = self.lse if lse is None else lse
        runner.compare(inputs, out[:rows], lse[:rows]).check()


def parts(rng: random.Random, total: int, most_parts: int) -> tuple[int, ...]:
    """Numbers that add up to `total`, some of them 0."""
    cuts = sorted(rng.choices(range(total + 1), k=rng.randrange(most_parts)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
    sizes += [0] * (BATCH - len(sizes))
    rng.shuffle(sizes)
    return tuple(sizes)


def random_lengths(rng: random.Random) -> Lengths:
    if rng.random() < 0.3:
        qo = tuple(rng.randint(0, 1) for _ in range(BATCH))
    else:
        qo = parts(rng, rng.choice((rng.randint(0, 40), rng.randint(0, ROWS))), BATCH)
    longest = (PAGES - BATCH) * PAGE
    kv = parts(rng, rng.choice((rng.randint(0, 300), rng.randint(0, longest))), BATCH)
    return Lengths(qo, kv)


@on_every_backend
@pytest.mark.parametrize(
    ("like", "count"),
    [(PAGED, 1000), (RAGGED, 300), (WINDOW, 200), (FIXED, 300), (WHOLE, 200)],
    ids=lambda value: getattr(value, "name", value),
)
def test_many_plans_of_one_graph(backend, like, count):
    """Against an ordinary wrapper, bit for bit where the bits do not depend on the batch's split,
    and every fiftieth against the oracle."""
    same_bits = like.disable_split_kv or like.fixed_split_size is not None
    pool = Pool(like, backend)
    pool.plan(Lengths((ROWS, *(0,) * (BATCH - 1)), (10,) * BATCH))
    pool.run()
    graph = pool.capture()
    ordinary = runner.make_wrapper(like, backend=backend, device="cuda")
    rng = random.Random(5)
    for i in range(count):
        inputs = pool.plan(random_lengths(rng), seed=i)
        pool.poison()
        graph.replay()
        rows = inputs.q.shape[0]
        assert bool(pool.out[rows:].isnan().all())
        assert bool(pool.lse[rows:].isnan().all())
        if i % 50 == 0:
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
def test_decode_like_graphs(backend):
    """The first plan decides on short tiles; later plans split or not."""
    pool = Pool(PAGED, backend)
    graph = pool.captured(DECODE)
    rng = random.Random(2)
    for seed in range(60):
        kv = parts(rng, rng.choice((30, 2000, 8000)), BATCH)
        rows = tuple(rng.randint(0, 1) for _ in range(BATCH))
        inputs = pool.plan(Lengths(rows, kv), seed)
        pool.poison()
        graph.replay()
        pool.check(inputs)
        assert bool(pool.out[inputs.q.shape[0] :].isnan().all())


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
            torch.cuda._sleep(20_000_000)
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
    torch.cuda._sleep(20_000_000)
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
        torch.cuda._sleep(200_000_000)
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
    heads = (8, 2, 128, PAGE)

    def begin(lengths: Lengths, seed: int) -> Inputs:
        inputs = pool.batch(lengths, seed)
        table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        pool.wrapper.begin_forward(*table, *heads, q_data_type=PAGED.dtype)
        return inputs

    begin(FIRST, 0)
    pool.wrapper.forward(pool.q, (pool.k, pool.v), causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for size in (2 << 10, 64 << 10, 80 << 10, 1 << 20):
            torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        out, lse = pool.wrapper.forward_return_lse(
            pool.q, (pool.k, pool.v), causal=True, window_left=100
        )
    for seed, lengths in enumerate((FIRST, DECODE, APPEND)):
        inputs = begin(lengths, seed)
        out.fill_(NAN)
        graph.replay()
        case = dataclasses.replace(inputs.case, window_left=100)
        pool.check(dataclasses.replace(inputs, case=case), out, lse)


@on_every_backend
def test_options_that_captures_ask_for_on_any_stream(backend):
    """Torch has 32 streams and hands them out in turns: one of these is the wrapper's own."""
    streams = {stream.cuda_stream: stream for stream in (torch.cuda.Stream() for _ in range(64))}
    pool = Pool(PAGED, backend)
    for window_left, stream in enumerate(streams.values(), start=100):
        inputs = pool.plan(DECODE)
        pool.poison()
        torch.cuda.synchronize()
        outputs = {"out": pool.out, "lse": pool.lse, "window_left": window_left}
        run = functools.partial(pool.wrapper.run, pool.q, *pool.kv(), **outputs)
        captured(run, stream)[0].replay()
        case = dataclasses.replace(inputs.case, window_left=window_left)
        pool.check(dataclasses.replace(inputs, case=case))


@on_every_backend
def test_a_graph_for_every_number_of_rows(backend):
    """Engines capture one wrapper with q of many lengths, and replay the one that fits."""
    pool = Pool(PAGED, backend)
    graphs = {}
    for rows in (600, 300, 16):
        pool.plan(Lengths((rows, *(0,) * 6), (600, *(0,) * 6)))
        pool.run()
        graphs[rows] = pool.capture(rows=rows)
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
    with (
        pytest.raises(RuntimeError, match="being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        runner.plan(pool.wrapper, other)
    torch.cuda.synchronize()
    pool.poison()
    pool.run()
    pool.check(inputs)


@contextlib.contextmanager
def no_waits():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
