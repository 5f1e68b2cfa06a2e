"""Milliseconds of one causal prefill over the GPUs of this machine, and of its parts.

for n in 1 2 4; do
    torchrun --standalone --nproc-per-node $n docs/examples/context_parallel.py 65536 262144
done

"attention" is the launches of one rank, "gather" the exchange of keys and values before them.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from preflash import distributed

HEADS, KV_HEADS, DIM, REPEATS = 32, 8, 128, 5

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
world, rank = dist.get_world_size(), dist.get_rank()
dtype = torch.bfloat16 if on_gpu else torch.float32
join_chunks = distributed.join_chunks


def milliseconds(call):
    times = []
    for _ in range(REPEATS + 1):  # the first loads kernels and connects
        dist.barrier()
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def attention(q, k, v, all_k, all_v):
    """Computes one rank's launches, with keys and values that were gathered before."""
    gathered = iter((all_k, all_v))
    distributed.join_chunks = lambda *_, **__: next(gathered)
    distributed.context_parallel_prefill(q, k, v)
    distributed.join_chunks = join_chunks


if rank == 0:
    print("| tokens | ranks | whole ms | attention ms | gather ms | TFLOP/s |")
    print("|---|---|---|---|---|---|")
for length in map(int, sys.argv[1:] or ["65536" if on_gpu else "1024"]):
    shapes = [(length // world, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    joined = [join_chunks(x) for x in (k, v)]
    calls = (
        lambda: distributed.context_parallel_prefill(q, k, v),  # noqa: B023
        lambda: attention(q, k, v, *joined),  # noqa: B023
        lambda: [join_chunks(x) for x in (k, v)],  # noqa: B023
    )
    times = [milliseconds(call) for call in calls]
    if rank == 0:
        tflops = 2 * length * length * HEADS * DIM / times[0] / 1e9
        cells = " | ".join(f"{ms:.2f}" for ms in times)
        print(f"| {length} | {world} | {cells} | {tflops:.3g} |", flush=True)
dist.destroy_process_group()
