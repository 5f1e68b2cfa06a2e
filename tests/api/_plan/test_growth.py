"""A server plans and runs for weeks: no step may leave anything behind. PREFLASH_STEPS=1000000 in
the environment takes as many steps as that."""

import collections
import ctypes
import gc
import os
import random
import sys

import preflash
import pytest
import torch

STEPS = int(os.environ.get("PREFLASH_STEPS", "4000"))
HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 1, 8, 4
PAGES = 32  # of the cache
WARM = 1000


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd",
                     "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def bytes_of_malloc() -> int:
    """All that C and C++ have allocated and not freed."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("a C library that does not count its memory")
    libc.mallinfo2.restype = _MallInfo2
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


class Server:
    """Batches of other lengths in every step, over two layers, by every way into a run."""

    def __init__(self, device: str, backend: str) -> None:
        self.random = random.Random(1)
        self.workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        self.wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(self.workspace, backend=backend)
        shape = (PAGES, 2, PAGE, KV_HEADS, HEAD_DIM)
        self.layers = [torch.randn(shape, device=device).half() for _ in range(2)]
        self.q = torch.randn(12, HEADS, HEAD_DIM, device=device).half()
        counts = (17_000, 40_000, 16_384, 100, 33_000)
        self.lists = collections.deque(torch.arange(n, dtype=torch.int32) for n in counts)
        self.lists[2][5] = -1

    def lengths(self) -> list[tuple[int, int, int]]:
        """(queries, pages, keys on the last) of each request."""
        draw = self.random.randint
        return [(draw(0, 3), draw(0, 6), draw(1, PAGE)) for _ in range(draw(0, 4))]

    def step(self) -> None:
        lengths = self.lengths()
        rows = sum(queries for queries, _, _ in lengths)
        indptr = [[0], [0]]
        for queries, pages, _ in lengths:
            indptr[0].append(indptr[0][-1] + queries)
            indptr[1].append(indptr[1][-1] + pages)
        qo_indptr, kv_indptr = (torch.tensor(one, dtype=torch.int32) for one in indptr)
        indices = torch.tensor(self.random.sample(range(PAGES), indptr[1][-1]), dtype=torch.int32)
        last = torch.tensor([keys for _, _, keys in lengths], dtype=torch.int32)
        self.wrapper.plan(qo_indptr, kv_indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, PAGE)
        q = self.q[:rows]
        out = torch.empty_like(q)
        for layer in self.layers:
            self.wrapper.run(q, layer)
            self.wrapper.run(q, layer, out=out)
        self.wrapper.run(q, layer, return_lse=True)
        self.wrapper.run(q, layer, window_left=self.random.randint(-1, 5))

    def wrapper_comes_and_goes(self) -> None:
        backend = self.wrapper._requested_backend.name
        self.wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(self.workspace, backend=backend)
        self.step()

    def page_lists(self) -> None:
        """Plans with lists of pages that have memory of their own; some plans are refused."""
        self.lists.rotate()
        pages = self.lists[0]
        arrays = (torch.arange(2, dtype=torch.int32) * n for n in (1, len(pages)))
        last = torch.ones(1, dtype=torch.int32)
        try:
            self.wrapper.plan(*arrays, pages, last, HEADS, KV_HEADS, HEAD_DIM, 1)
        except ValueError:
            assert pages[5] == -1


def settle() -> None:
    """Buffers that a GPU still uses are kept until it is done: more of them the busier it is."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    gc.collect()


def take(step, steps: int) -> None:
    """Waits for the GPU now and then: how far the host runs ahead decides what is in flight, and
    with it what the driver and torch allocate once."""
    for i in range(steps):
        if i % 50 == 0 and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        step()
    settle()


def growth(step, steps: int) -> tuple[int, int]:
    """Returns the growth of Python's blocks and of malloc's bytes over `steps` steps."""
    take(step, WARM)
    blocks, allocated = sys.getallocatedblocks(), bytes_of_malloc()
    take(step, steps)
    return sys.getallocatedblocks() - blocks, bytes_of_malloc() - allocated


def check_steady(step, steps: int) -> None:
    """Less than a block in four steps, and 8 bytes a step: not what any object takes that is left.
    Caches of the interpreter and of torch add some 250 blocks once, however many the steps are, and
    a driver on a busy GPU some 300 KB; what a step leaves behind shows in every window."""
    for _ in range(3):
        blocks, allocated = growth(step, steps)
        if blocks < steps / 4 and allocated < steps * 8:
            return
    raise AssertionError(f"{steps} steps leave {blocks} blocks and {allocated} bytes")


@pytest.mark.parametrize("way", ["step", "wrapper_comes_and_goes", "page_lists"])
def test_no_growth(target, way):
    server = Server(target.device, target.backend)
    if target.device == "cpu":
        torch.set_num_threads(1)
    check_steady(getattr(server, way), STEPS if way == "step" else STEPS // 2)
    if target.device == "cuda" and way != "page_lists":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(STEPS // 4):
            server.step()
        torch.cuda.synchronize()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_a_leak_is_noticed():
    server = Server("cpu", "cpu")
    kept = []

    def step():
        server.step()
        kept.append(bytearray(16))

    with pytest.raises(AssertionError):
        check_steady(step, 2000)
