"""batch_invariant=True: the bits of a request's rows depend on the request alone."""

import dataclasses
import itertools
import os
import subprocess
import sys

import preflash
import pytest
import torch
from preflash.testing import runner

HEADS, KV_HEADS, D, PAGE = 4, 2, 64, 16
# Long enough for other plans to cut the keys; the last request is a decode step.
QO_LENS, KV_LENS = (37, 300, 1), (4500, 2100, 6200)


@dataclasses.dataclass
class Served:
    """Requests with causal masking, and their tensors."""

    target: object
    dtype: torch.dtype
    q: list[torch.Tensor]  # [qo_len, HEADS, D] of each request
    k: list[torch.Tensor]  # [kv_len, KV_HEADS, D]
    v: list[torch.Tensor]
    float_bytes: int = 64 << 20

    def workspace(self):
        return runner.workspace(self.target.device, self.float_bytes)

    def options(self):
        return {"q_data_type": self.dtype, "batch_invariant": True}

    def pages(self, requests, page_size=PAGE, layout="NHD"):
        """kv_indptr, indices, last_page_len and a cache of mixed pages."""
        counts = [-(-len(self.k[i]) // page_size) for i in requests]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7))
        cache = torch.zeros(sum(counts), 2, page_size, KV_HEADS, D, dtype=self.dtype)
        taken = 0
        for i, count in zip(requests, counts, strict=True):
            for half, rows in enumerate((self.k[i], self.v[i])):
                whole = torch.zeros(count * page_size, KV_HEADS, D, dtype=self.dtype)
                whole[: len(rows)] = rows.cpu()
                cache[order[taken : taken + count], half] = whole.view(
                    count, page_size, KV_HEADS, D
                )
            taken += count
        if layout == "HND":
            cache = cache.transpose(2, 3).contiguous()
        last = [len(self.k[i]) - (n - 1) * page_size for i, n in zip(requests, counts, strict=True)]
        return indptr(counts), order.int(), ints(last), cache.to(self.target.device)

    def prefill(self, requests, rows=None, *, page_size=PAGE, layout="NHD", graph=False):
        """Rows of each request by the paged wrapper; rows: (begin, end) of the only request."""
        q = [self.q[i] for i in requests]
        served = self
        if rows is not None:
            (i,), (begin, end) = requests, rows
            kv_len = len(self.k[i]) - (len(self.q[i]) - end)
            q = [self.q[i][begin:end]]
            cut = {name: list(getattr(self, name)) for name in "kv"}
            cut["k"][i], cut["v"][i] = self.k[i][:kv_len], self.v[i][:kv_len]
            served = dataclasses.replace(self, **cut)
        kv_indptr, indices, last, cache = served.pages(requests, page_size, layout)
        qo_indptr = indptr([len(one) for one in q])
        buffers = {}
        if graph:
            device = self.target.device
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": qo_indptr.to(device),
                "paged_kv_indptr_buf": kv_indptr.to(device),
                "paged_kv_indices_buf": indices.to(device),
                "paged_kv_last_page_len_buf": last.to(device),
            }
        wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace(), layout, backend=self.target.backend, **buffers
        )
        wrapper.plan(
            qo_indptr, kv_indptr, indices, last, HEADS, KV_HEADS, D, page_size,
            causal=True, **self.options(),
        )  # fmt: skip
        return wrapper.run(torch.cat(q), cache).split([len(one) for one in q])


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def indptr(counts):
    return ints([0, *counts]).cumsum(0, dtype=torch.int32)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def served(request, target):
    generator = torch.Generator().manual_seed(3)

    def values(rows, heads):
        made = torch.randn(rows, heads, D, generator=generator)
        return made.to(request.param).to(target.device)

    return Served(
        target,
        request.param,
        [values(n, HEADS) for n in QO_LENS],
        [values(n, KV_HEADS) for n in KV_LENS],
        [values(n, KV_HEADS) for n in KV_LENS],
    )


@pytest.fixture
def wanted(served):
    """The rows of the requests as one batch."""
    return served.prefill((0, 1, 2))


def test_the_rest_of_the_batch(served, wanted):
    for i in range(3):
        assert torch.equal(served.prefill((i,))[0], wanted[i])
    second, first = served.prefill((1, 0))
    assert torch.equal(first, wanted[0])
    assert torch.equal(second, wanted[1])


@pytest.mark.parametrize("cuts", [(0, 1, 37), (0, 20, 36, 37)])
def test_chunks_of_a_prefill(served, wanted, cuts):
    for rows in itertools.pairwise(cuts):
        assert torch.equal(served.prefill((0,), rows)[0], wanted[0][slice(*rows)]), rows


@pytest.mark.parametrize(
    "form", [{"page_size": 1}, {"page_size": 64}, {"layout": "HND"}, {"graph": True}], ids=str
)
def test_page_size_layout_and_graphs(served, wanted, form):
    for got, rows in zip(served.prefill((0, 1, 2), **form), wanted, strict=True):
        assert torch.equal(got, rows)


def test_decode(served, wanted):
    kv_indptr, indices, last, cache = served.pages((0, 1, 2))
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        served.workspace(), backend=served.target.backend
    )
    wrapper.plan(kv_indptr, indices, last, HEADS, KV_HEADS, D, PAGE, **served.options())
    got = wrapper.run(torch.stack([q[-1] for q in served.q]), cache)
    assert torch.equal(got, torch.stack([rows[-1] for rows in wanted]))


def test_ragged_keys(served, wanted):
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        served.workspace(), backend=served.target.backend
    )
    wrapper.plan(
        indptr(QO_LENS), indptr(KV_LENS), HEADS, KV_HEADS, D, causal=True, **served.options()
    )
    got = wrapper.run(*(torch.cat(tensors) for tensors in (served.q, served.k, served.v)))
    assert torch.equal(got, torch.cat(wanted))


def test_single_requests(served, wanted):
    options = {"backend": served.target.backend, "batch_invariant": True}
    for q, k, v, rows in zip(served.q, served.k, served.v, wanted, strict=True):
        got = preflash.single_prefill_with_kv_cache(q, k, v, causal=True, **options)
        assert torch.equal(got, rows)
        got = preflash.single_decode_with_kv_cache(q[-1], k, v, batch_invariant=True)
        if served.target.backend != "fa2":  # this function takes no backend
            assert torch.equal(got, rows[-1])


def test_prefill_beside_decode(served, wanted):
    wrapper = preflash.PODWithPagedKVCacheWrapper(served.workspace())
    kv_indptr, indices, last, cache = served.pages((0, 2))
    wrapper.plan(kv_indptr, indices, last, HEADS, KV_HEADS, D, PAGE, **served.options())
    prefill, decode = wrapper.run(
        served.q[1], served.k[1], served.v[1], torch.stack([served.q[0][-1], served.q[2][-1]]),
        cache, causal_p=True,
    )  # fmt: skip
    if served.target.backend == "fa2":
        pytest.skip("the wrapper takes no backend")
    assert torch.equal(prefill, wanted[1])
    assert torch.equal(decode, torch.stack([wanted[0][-1], wanted[2][-1]]))


def test_windows_and_upper_bounds(served):
    """The bits are the same where only the device knows the lengths."""
    kv_indptr, indices, last, cache = served.pages((0, 1, 2))
    results = []
    for bounds in (False, True):
        wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
            served.workspace(), backend=served.target.backend
        )
        lens = ints(KV_LENS).to(served.target.device) if bounds else None
        wrapper.plan(
            indptr(QO_LENS), kv_indptr, indices, last, HEADS, KV_HEADS, D, PAGE, causal=True,
            window_left=3000, seq_lens=lens, lengths_are_upper_bounds=bounds, **served.options(),
        )  # fmt: skip
        results.append(wrapper.run(torch.cat(served.q), cache))
    assert torch.equal(*results)


def test_no_workspace_is_needed(served, wanted):
    got = dataclasses.replace(served, float_bytes=0).prefill((0, 1, 2))
    assert torch.equal(torch.cat(got), torch.cat(wanted))


def test_the_environment_sets_it_for_every_call():
    """A plan that cuts no keys needs no workspace."""
    code = """
import torch, preflash
def indptr(n):
    return torch.tensor([0, n], dtype=torch.int32)
wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
    torch.empty(1 << 20, dtype=torch.uint8), backend="cpu")
print(wrapper.workspace_size(indptr(1), indptr(30000), 1, 1, 8)[0] > 0)
"""
    for value, is_cut in (("1", "False"), ("0", "True"), ("", "True")):
        environment = {**os.environ, "PREFLASH_BATCH_INVARIANT": value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == is_cut, done.stderr
