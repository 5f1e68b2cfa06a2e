"""Captured runs under many plans, streams and graphs; the rest is in tests/api.

One set of random tensors serves every batch, so that a plan costs no more than its lengths.
"""

import dataclasses
import functools
import itertools
import random
import types

import preflash
import pytest
import torch
from backends import captured, no_waits, replay, sleep
from graph_stage import Limits, Stage
from preflash.testing import Case, Inputs, MaskKind, runner
from preflash.testing.inputs import indptr

BATCH, ROWS, PAGES, PAGE = 7, 600, 512, 16
PAGED = Case("paged", (), (), 8, 2, 128, page_size=PAGE, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
FIXED = dataclasses.replace(PAGED, name="fixed", fixed_split_size=1024)
WHOLE = dataclasses.replace(RAGGED, name="whole", disable_split_kv=True)
WINDOW = dataclasses.replace(PAGED, name="window", window_left=100, head_dim=64)


# Lengths of queries and of keys.
FIRST = (500, 100, 0, 0, 0, 0, 0), (900, 100, 7, 0, 0, 300, 1)
DECODE = (1,) * 7, (3000, 5, 17, 900, 64, 0, 1200)
APPEND = (64, 1, 0, 33, 129, 5, 2), (512, 1, 77, 40, 129, 2000, 2)
LONGEST = (ROWS, 0, 0, 0, 0, 0, 0), (10,) * BATCH


class Pool(Stage):
    """Random tensors that every batch shares, and a wrapper with use_cuda_graph=True on them."""

    def __init__(self, like: Case, backend: str) -> None:
        pages, tokens = (PAGES, 0) if like.paged else (0, PAGES * PAGE)
        target = types.SimpleNamespace(device="cuda", backend=backend)
        super().__init__(like, Limits(BATCH, ROWS, pages, tokens), target)
        generator = torch.Generator("cuda").manual_seed(1)
        for tensor in (self.q, self.k, self.v):
            tensor.normal_(generator=generator)

    def batch(self, qo_lens, kv_lens, seed: int = 0) -> Inputs:
        """Returns a batch of the pool's own tensors and a random page table."""
        case = dataclasses.replace(self.like, qo_lens=qo_lens, kv_lens=kv_lens)
        q = self.q[: sum(qo_lens)]
        inputs = Inputs(case, q, indptr(qo_lens), indptr(kv_lens), self.k, self.v)
        if case.paged:
            counts = [-(-n // PAGE) for n in kv_lens]
            pages = random.Random(seed).sample(range(PAGES), sum(counts))
            last = [(n - 1) % PAGE + 1 if n else 0 for n in kv_lens]
            inputs.cache = (self.k, self.v)
            inputs.kv_indptr = indptr(counts)
            inputs.indices = torch.tensor(pages, dtype=torch.int32)
            inputs.last_page_len = torch.tensor(last, dtype=torch.int32)
            spans = itertools.pairwise(inputs.kv_indptr.tolist())
            inputs.page_table = [pages[begin:end] for begin, end in spans]
        return inputs

    def planned(self, lengths, seed: int = 0) -> Inputs:
        """Plans a batch, fills the outputs with NaN and returns the batch."""
        inputs = self.batch(*lengths, seed)
        runner.plan(self.wrapper, inputs)
        self.poison()
        return inputs

    def capture(self, stream=None, **options) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        return captured(functools.partial(self.run, **options), stream)[0]

    def captured(self, lengths, **options) -> torch.cuda.CUDAGraph:
        """Plans, runs and captures."""
        self.planned(lengths)
        self.run()
        return self.capture(**options)


def check(inputs: Inputs, out, lse, **options) -> None:
    """Compares with the oracle; options: of the case that ran."""
    rows = inputs.q.shape[0]
    inputs = dataclasses.replace(inputs, case=dataclasses.replace(inputs.case, **options))
    runner.compare(inputs, out[:rows], lse[:rows]).check()


def parts(rng: random.Random, total: int) -> tuple[int, ...]:
    """Returns numbers that add up to `total`, some of them 0."""
    cuts = sorted(rng.choices(range(total + 1), k=rng.randrange(BATCH)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
    sizes += [0] * (BATCH - len(sizes))
    rng.shuffle(sizes)
    return tuple(sizes)


def drawn(rng: random.Random, decodes: float) -> tuple:
    """Draws lengths: with that probability of a decode step."""
    qo = parts(rng, rng.choice((rng.randint(0, 40), rng.randint(0, ROWS))))
    if rng.random() < decodes:
        qo = tuple(rng.randint(0, 1) for _ in range(BATCH))
    longest = (PAGES - BATCH) * PAGE
    return qo, parts(rng, rng.choice((rng.randint(0, 300), rng.randint(0, longest))))


MANY_PLANS = {
    "paged": (PAGED, LONGEST, 0.3, 500, 25),
    "ragged": (RAGGED, LONGEST, 0.3, 200, 25),
    "window": (WINDOW, LONGEST, 0.3, 200, 25),
    "fixed": (FIXED, LONGEST, 0.3, 200, 25),
    "whole": (WHOLE, LONGEST, 0.3, 200, 25),
    # The first plan decides on short tiles; later plans split or not.
    "decode": (PAGED, DECODE, 1.0, 60, 1),
}


@pytest.mark.parametrize(
    ("like", "first", "decodes", "count", "step"), MANY_PLANS.values(), ids=MANY_PLANS
)
def test_many_plans_of_one_graph(backend, like, first, decodes, count, step):
    """Replays equal an ordinary wrapper, in all bits where those do not depend on the split."""
    pool = Pool(like, backend)
    graph = pool.captured(first)
    ordinary = runner.make_wrapper(like, backend=backend, device="cuda")
    rng = random.Random(5)
    for i in range(count):
        inputs = pool.planned(drawn(rng, decodes), seed=i)
        graph.replay()
        rows = inputs.q.shape[0]
        assert bool(pool.out[rows:].isnan().all())
        assert bool(pool.lse[rows:].isnan().all())
        if i % step == 0:
            check(inputs, pool.out, pool.lse)
        runner.plan(ordinary, inputs)
        out, lse = ordinary.run(inputs.q, *pool.cache(), return_lse=True)
        if like.is_invariant:
            assert torch.equal(pool.out[:rows], out)
            assert torch.equal(pool.lse[:rows], lse)
        else:
            torch.testing.assert_close(pool.out[:rows], out, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(pool.lse[:rows], lse, rtol=1e-4, atol=1e-3)


def test_capture_plan_and_replay_on_streams_of_their_own(backend):
    pool = Pool(FIXED, backend)
    planning, capturing, replaying = (torch.cuda.Stream() for _ in range(3))
    planning.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(planning):
        pool.planned(FIRST)
        pool.run()
    graph = pool.capture(stream=capturing)
    for lengths in (DECODE, APPEND, FIRST):
        planning.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(planning):
            sleep(10)
            inputs = pool.planned(lengths)
        replaying.wait_stream(planning)
        with torch.cuda.stream(replaying):
            graph.replay()
        torch.cuda.current_stream().wait_stream(replaying)
        check(inputs, pool.out, pool.lse)


def test_plans_and_replays_back_to_back(backend):
    """The host is far ahead and waits for nothing: every replay finds its own plan."""
    pool = Pool(PAGED, backend)
    graph = pool.captured(FIRST)
    results = []
    with no_waits():
        sleep(10)
        for seed, lengths in enumerate((DECODE, APPEND, FIRST) * 4):
            inputs = pool.planned(lengths, seed)
            graph.replay()
            results.append((inputs, pool.out.clone(), pool.lse.clone()))
    for result in results:
        check(*result)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("runs_on_default", [False, True])
def test_a_plan_waits_for_runs_on_other_streams(backend, captured, runs_on_default):
    """plan() writes what runs read: the work list that a graph holds, and the page indices."""
    pool = Pool(PAGED, backend)
    if captured:
        pool.captured(FIRST)
    before = pool.planned(APPEND, seed=3)
    pool.run()
    out, lse = torch.empty_like(pool.out), torch.empty_like(pool.lse)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream()]
    running, planning = reversed(streams) if runs_on_default else streams
    with torch.cuda.stream(running):
        sleep(100)
        pool.run(out=out, lse=lse)
    with torch.cuda.stream(planning):
        after = pool.planned(DECODE, seed=4)
        pool.run()
    torch.cuda.synchronize()
    check(before, out, lse)
    check(after, pool.out, pool.lse)


def test_options_that_only_a_capture_asks_for(backend):
    """forward() under capture has a window that no forward() had: its work list stays allocated."""
    pool = Pool(PAGED, backend)
    (cache,) = pool.cache()

    def begin(lengths, seed: int) -> Inputs:
        inputs = pool.batch(*lengths, seed)
        table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        pool.wrapper.begin_forward(*table, 8, 2, 128, PAGE, q_data_type=PAGED.dtype)
        return inputs

    def forward():
        for size in (2 << 10, 64 << 10, 80 << 10, 1 << 20):
            torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        return pool.wrapper.forward_return_lse(pool.q, cache, causal=True, window_left=100)

    begin(FIRST, 0)
    pool.wrapper.forward(pool.q, cache, causal=True)
    torch.cuda.synchronize()
    graph, result = captured(forward)
    for seed, lengths in enumerate((FIRST, DECODE, APPEND)):
        inputs = begin(lengths, seed)
        replay(graph, *result)
        check(inputs, *result, window_left=100)


def test_options_that_captures_ask_for_on_any_stream(backend):
    """Torch has 32 streams and hands them out in turns: one of these is the wrapper's own."""
    streams = {stream.cuda_stream: stream for stream in (torch.cuda.Stream() for _ in range(64))}
    pool = Pool(PAGED, backend)
    for window_left, stream in enumerate(streams.values(), start=100):
        inputs = pool.planned(DECODE)
        pool.capture(stream, window_left=window_left).replay()
        check(inputs, pool.out, pool.lse, window_left=window_left)


def test_a_graph_for_every_number_of_rows(backend):
    """Engines capture one wrapper with q of many lengths, and replay the one that fits."""
    pool = Pool(PAGED, backend)
    graphs = {}
    for rows in (600, 300, 16):
        graphs[rows] = pool.captured(((rows, *(0,) * 6), (600, *(0,) * 6)), rows=rows)
    for seed, lengths in enumerate((APPEND, DECODE, FIRST)):
        inputs = pool.planned(lengths, seed)
        graphs[min(rows for rows in graphs if rows >= sum(lengths[0]))].replay()
        check(inputs, pool.out, pool.lse)


def test_a_plan_under_capture_is_refused(backend):
    pool = Pool(PAGED, backend)
    inputs = pool.planned(FIRST)
    pool.run()
    torch.cuda.synchronize()
    other = pool.batch(*DECODE)
    with pytest.raises(RuntimeError, match="being captured"):
        captured(lambda: runner.plan(pool.wrapper, other))
    torch.cuda.synchronize()
    pool.poison()
    pool.run()
    check(inputs, pool.out, pool.lse)


def test_a_fast_decode_plan_of_slots_does_not_wait(backend):
    """Plans as SGLang does: one-token pages on the GPU, each request's offsets on the host."""
    slots = torch.randperm(PAGES, dtype=torch.int32, device="cuda")
    begins = indptr((100, 0, 3, 200, 1))
    ones = torch.ones(5, dtype=torch.int32, device="cuda")
    k, v = torch.randn(2, PAGES, 2, 128, device="cuda").half()
    q = torch.randn(5, 8, 128, device="cuda").half()
    results = []
    for table in ([begins, slots.cpu(), ones.cpu()], [begins.cuda(), slots, ones]):
        wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
            runner.workspace("cuda"), backend=backend
        )
        with no_waits():
            preflash.fast_decode_plan(
                wrapper, *table, 8, 2, 128, 1, global_override_indptr_cpu=begins
            )
        results.append(wrapper.run(q, (k, v)))
    assert torch.equal(*results)
