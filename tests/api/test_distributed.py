"""Context-parallel prefill against one device: four processes with gloo, two GPUs with NCCL."""

from __future__ import annotations

import math
import os
import socket

import preflash
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from preflash.distributed import context_parallel_prefill, join_chunks, own_chunks


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ranks_of(rank, world, port, device_type, dtype, cases, tolerance):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    kind = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(kind, rank=rank, world_size=world)
    try:
        for length, heads, kv_heads, dim, causal, soft_cap in cases:
            generator = torch.Generator().manual_seed(length)
            shapes = ((length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim))
            q, k, v = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
            expected, expected_lse = preflash.single_prefill_with_kv_cache_return_lse(
                q, k, v, causal=causal, logits_soft_cap=soft_cap
            )
            own = [own_chunks(x) for x in (q, k, v)]
            out, lse = context_parallel_prefill(*own, causal=causal, logits_soft_cap=soft_cap)
            torch.testing.assert_close(join_chunks(out), expected, **tolerance)
            torch.testing.assert_close(join_chunks(lse), expected_lse, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="must be a multiple of"):
            own_chunks(torch.zeros(2 * world + 1))
        with pytest.raises(ValueError, match="must be equal and even"):
            context_parallel_prefill(*(x[1:] for x in own))
        with pytest.raises(TypeError, match=r"v is torch\.float64"):
            context_parallel_prefill(own[0], own[1], own[2].double())
        # Every rank's call is refused, and leaves nothing behind that the next one waits for.
        with pytest.raises(ValueError, match="sm_scale=nan"):
            context_parallel_prefill(*own, sm_scale=math.nan)
        out, _ = context_parallel_prefill(*own, causal=causal, logits_soft_cap=soft_cap)
        torch.testing.assert_close(join_chunks(out), expected, **tolerance)
    finally:
        dist.destroy_process_group()


CASES = [
    # length, heads, KV heads, head_dim, causal, soft cap
    (8, 2, 1, 64, True, None),
    (328, 4, 2, 64, True, None),
    (328, 4, 2, 64, False, None),
    (512, 2, 2, 40, True, 3.0),
]


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_four_processes():
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    arguments = (4, free_port(), "cpu", torch.float32, CASES, tolerance)
    mp.start_processes(ranks_of, arguments, nprocs=4, start_method="fork")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_gpus(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"{torch.cuda.device_count()} GPU")
    cases = [*CASES[1:], (8192, 32, 8, 128, True, None)]
    arguments = (world, free_port(), "cuda", torch.bfloat16, cases, {"rtol": 0.02, "atol": 0.02})
    mp.start_processes(ranks_of, arguments, nprocs=world, start_method="spawn")
