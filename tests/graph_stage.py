"""A wrapper with use_cuda_graph=True, tensors that never move, and batches that come and go.

On a GPU a run is captured into a CUDA graph. On the CPU, where there are none, the prepared launch
is recorded with its addresses and started again: a replay finds what the last plan() left.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import types

import pytest
import torch
from preflash._device import backends
from preflash.testing import Case, Inputs, build, runner

NAN = float("nan")


class _Recorder:
    """Holds back the launches of the CPU while they are being captured."""

    starts: list | None = None

    def launch(self, start) -> bool:
        if self.starts is None:
            return start()
        self.starts.append(start)
        return True

    def capture(self, run):
        self.starts = starts = []
        try:
            run()
        finally:
            self.starts = None
        return types.SimpleNamespace(replay=lambda: [start() for start in starts])


@pytest.fixture
def recorder(monkeypatch) -> _Recorder:
    made = _Recorder()
    monkeypatch.setattr(backends.CpuBackend, "launched_by", made.launch)
    return made


def capture(recorder: _Recorder, device: str, run, stream=None):
    """Captures what run() launches; returns an object with replay()."""
    if device == "cpu":
        return recorder.capture(run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


@dataclasses.dataclass
class Limits:
    batch: int
    rows: int
    pages: int = 0  # of the pool; ragged: 0
    tokens: int = 0  # of k and v; paged: 0


class Stage:
    """Fixed memory for batches like `like`, within limits."""

    def __init__(
        self, like: Case, limits: Limits, target, *, workspace=None, masked: bool = False
    ) -> None:
        self.like, self.limits, self.device = like, limits, target.device
        kv_rows = (limits.pages, like.page_size) if like.paged else (limits.tokens,)
        if like.layout == "HND":
            kv_shape = (*kv_rows[:-1], like.num_kv_heads, kv_rows[-1])
        else:
            kv_shape = (*kv_rows, like.num_kv_heads)
        self.q = self._empty(limits.rows, like.num_qo_heads, like.head_dim)
        self.k, self.v = (self._empty(*kv_shape, d) for d in (like.head_dim, like.dim_vo))
        self.out = self._empty(limits.rows, like.num_qo_heads, like.dim_vo)
        self.lse = self._empty(limits.rows, like.num_qo_heads, dtype=torch.float32)
        sizes = {"qo_indptr_buf": limits.batch + 1}
        if like.paged:
            sizes |= {"paged_kv_indptr_buf": limits.batch + 1, "paged_kv_indices_buf": limits.pages}
            sizes["paged_kv_last_page_len_buf"] = limits.batch
        else:
            sizes["kv_indptr_buf"] = limits.batch + 1
        if masked:
            keys = limits.tokens + limits.pages * like.page_size
            sizes["custom_mask_buf"] = limits.rows * keys // 8 + limits.batch + 8
            sizes["mask_indptr_buf"] = limits.batch + 1
        self.buffers = {name: self._ints(size) for name, size in sizes.items()}
        if masked:
            self.buffers["custom_mask_buf"] = self.buffers["custom_mask_buf"].fill_(-1).byte()
        self.wrapper = runner.make_wrapper(
            like, backend=target.backend, device=self.device, buffer=workspace,
            use_cuda_graph=True, **self.buffers,
        )  # fmt: skip

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=dtype or self.like.dtype, device=self.device)

    def _ints(self, count: int) -> torch.Tensor:
        return torch.full((count,), -7, dtype=torch.int32, device=self.device)

    def make(self, qo_lens, kv_lens, seed: int = 0, *, on_host: bool = True, **options) -> Inputs:
        """A batch: its arrays on the CPU unless on_host=False."""
        case = dataclasses.replace(
            self.like, qo_lens=tuple(qo_lens), kv_lens=tuple(kv_lens), **options
        )
        index_device = "cpu" if on_host else self.device
        return build(case, device=self.device, index_device=index_device, seed=seed)

    def random(self, seed: int, **options) -> Inputs:
        """Up to the limits; some requests are empty."""
        rng = random.Random(seed)
        limits = self.limits

        def parts(total: int) -> list[int]:
            cuts = [0, *sorted(rng.randint(0, total) for _ in range(limits.batch - 1)), total]
            lengths = [end - begin for begin, end in itertools.pairwise(cuts)]
            return rng.sample(lengths, len(lengths))

        qo_lens = parts(rng.choice((1, limits.rows // 2, limits.rows)))
        size = max(self.like.page_size, 1)
        # inputs.py adds spare pages and rows.
        room = (limits.pages or limits.tokens) - 6 - limits.batch
        units = parts(max(rng.choice((1, room // 8, room)), 1))
        kv_lens = [max(n * size - rng.randrange(size), 0) if n else 0 for n in units]
        return self.make(qo_lens, kv_lens, seed, on_host=bool(seed % 2), **options)

    def load(self, inputs: Inputs) -> None:
        """The batch's values into the fixed tensors; everything else is NaN."""
        tokens = 1 if self.like.layout == "HND" and not self.like.paged else 0
        for name, dim in (("q", 0), ("k", tokens), ("v", tokens)):
            fixed, values = getattr(self, name), getattr(inputs, name)
            fixed.fill_(NAN)
            fixed.narrow(dim, 0, values.shape[dim]).copy_(values)
        self.poison()

    def poison(self) -> None:
        self.out.fill_(NAN)
        self.lse.fill_(NAN)

    def plan(self, inputs: Inputs, **overrides) -> None:
        self.load(inputs)
        runner.plan(self.wrapper, inputs, **overrides)

    def cache(self) -> tuple:
        return ((self.k, self.v),) if self.like.paged else (self.k, self.v)

    def run(self, rows: int | None = None, **options) -> None:
        part = slice(0, rows)
        outputs = {"out": self.out[part], "lse": self.lse[part], "return_lse": True}
        self.wrapper.run(self.q[part], *self.cache(), **{**outputs, **options})

    def check(self, inputs: Inputs, **options) -> None:
        """The output is the batch's, and nothing is written behind it."""
        rows = inputs.q.shape[0]
        runner.compare(inputs, self.out[:rows], self.lse[:rows], **options).check()
        assert bool(self.out[rows:].isnan().all())
        assert bool(self.lse[rows:].isnan().all())
