"""A server plans and runs for weeks: no step leaves anything in memory. PREFLASH_STEPS=1000000 in
the environment takes that many steps."""

import collections
import ctypes
import gc
import os
import random
import sys

import preflash
import pytest
import torch
from preflash.testing.inputs import indptr

STEPS = int(os.environ.get("PREFLASH_STEPS", "2000"))
HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 1, 8, 4
PAGES = 32  # of the cache
WARM = 1000


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd",
                     "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def bytes_of_malloc() -> int:
    """Returns the bytes that C and C++ have allocated and not freed."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("a C library that does not count its memory")
    libc.mallinfo2.restype = _MallInfo2
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


class Server:
    """Plans a batch of other lengths in each step, and runs two layers by every form of run()."""

    def __init__(self, device: str, backend: str) -> None:
        self.random = random.Random(1)
        self.window_runs = 0
        self.workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        self.wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(self.workspace, backend=backend)
        self.backend = backend
        shape = (PAGES, 2, PAGE, KV_HEADS, HEAD_DIM)
        self.layers = [torch.randn(shape, device=device).half() for _ in range(2)]
        self.q = torch.randn(12, HEADS, HEAD_DIM, device=device).half()
        counts = (17_000, 40_000, 16_384, 100, 33_000)
        self.lists = collections.deque(torch.arange(n, dtype=torch.int32) for n in counts)
        self.lists[2][5] = -1

    def step(self) -> None:
        draw = self.random.randint
        # Queries, pages, and keys on the last page of each request.
        lengths = [(draw(0, 3), draw(0, 6), draw(1, PAGE)) for _ in range(draw(0, 4))]
        queries, pages, last = zip(*lengths, strict=True) if lengths else ((), (), ())
        indices = torch.tensor(self.random.sample(range(PAGES), sum(pages)), dtype=torch.int32)
        last = torch.tensor(last, dtype=torch.int32)
        heads = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
        self.wrapper.plan(indptr(queries), indptr(pages), indices, last, *heads)
        q = self.q[: sum(queries)]
        out = torch.empty_like(q)
        for layer in self.layers:
            self.wrapper.run(q, layer)
            self.wrapper.run(q, layer, out=out)
        self.wrapper.run(q, layer, return_lse=True)
        self.wrapper.run(q, layer, window_left=self.random.randint(-1, 5))
        self.wrapper.forward(q, layer, sm_scale=self.random.random())  # is remembered

    def wrapper_comes_and_goes(self) -> None:
        make = preflash.BatchPrefillWithPagedKVCacheWrapper
        self.wrapper = make(self.workspace, backend=self.backend)
        self.step()

    def page_lists(self) -> None:
        """Plans with lists of pages that have memory of their own; some plans are refused."""
        self.lists.rotate()
        pages, last = self.lists[0], torch.ones(1, dtype=torch.int32)
        heads = (HEADS, KV_HEADS, HEAD_DIM, 1)
        try:
            self.wrapper.plan(indptr([1]), indptr([len(pages)]), pages, last, *heads)
        except ValueError:
            assert pages[5] == -1

    def windows(self, longest: int = 0) -> None:
        """Runs one plan of 4000 keys with many windows; longest: with one that has all keys."""
        if not self.window_runs:
            pages, last = torch.arange(1000, dtype=torch.int32) % PAGES, torch.tensor([PAGE]).int()
            heads = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
            self.wrapper.plan(indptr([1]), indptr([1000]), pages, last, *heads)
        self.window_runs += 1
        window = longest + self.window_runs if longest else self.random.randrange(4000)
        self.wrapper.run(self.q[:1], self.layers[0], window_left=window)

    def windows_of_all_keys(self) -> None:
        """NOTE: other windows would evict these, which are one plan."""
        self.windows(2**30)


def allocated_after(step, steps: int) -> tuple[int, int]:
    """Returns Python's blocks and malloc's bytes after the steps. A host far ahead of the GPU would
    keep more buffers in flight, and driver and torch would allocate more."""
    for i in range(steps):
        if i % 50 == 0 and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    gc.collect()
    return sys.getallocatedblocks(), bytes_of_malloc()


def check_steady(step, steps: int) -> None:
    """Requires less than a block in four steps and 8 bytes a step, less than any object takes.
    Caches of the interpreter and of torch add some 250 blocks once, and a driver on a busy GPU some
    300 KB; a leak shows in each of three windows."""
    grown = []
    for _ in range(3):
        before = allocated_after(step, WARM)
        grown = [b - a for a, b in zip(before, allocated_after(step, steps), strict=True)]
        if grown[0] < steps / 4 and grown[1] < steps * 8:
            return
    raise AssertionError(f"{steps} steps leave {grown[0]} blocks and {grown[1]} bytes")


@pytest.mark.parametrize(
    "way", ["step", "wrapper_comes_and_goes", "page_lists", "windows", "windows_of_all_keys"]
)
def test_no_growth(target, way):
    server = Server(target.device, target.backend)
    if target.device == "cpu":
        torch.set_num_threads(1)
    check_steady(getattr(server, way), STEPS)
    if target.device == "cuda" and way in ("step", "wrapper_comes_and_goes"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(STEPS // 2):
            server.step()
        torch.cuda.synchronize()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
