"""Milliseconds of one causal prefill over the GPUs of this machine, and what of them are the ring.

for n in 1 2 4; do
    torchrun --standalone --nproc-per-node $n docs/examples/context_parallel.py 65536 262144
done

The ring runs under the products where "whole" is near "products", not near "products" + "ring".
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from preflash import distributed

HEADS, KV_HEADS, DIM, REPEATS = 32, 8, 128, 5

os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # the ring gets its SMs before the products
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
world, rank = dist.get_world_size(), dist.get_rank()
dtype = torch.bfloat16 if on_gpu else torch.float32
pass_on = distributed._pass_on


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


def products(q, k, v):
    """The same launches on this rank's keys, which go nowhere."""
    distributed._pass_on = lambda kv, tokens, group: (kv, [])
    distributed.context_parallel_prefill(q, k, v)
    distributed._pass_on = pass_on


def ring(k, v):
    for _ in range(world - 1):
        for work in pass_on((k, v), len(k), None)[1]:
            work.wait()


if rank == 0:
    print("| tokens | ranks | whole ms | products ms | ring ms | TFLOP/s |")
    print("|---|---|---|---|---|---|")
for length in map(int, sys.argv[1:] or ["65536" if on_gpu else "1024"]):
    shapes = [(length // world, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    whole = milliseconds(lambda: distributed.context_parallel_prefill(q, k, v))  # noqa: B023
    parts = [milliseconds(lambda: products(q, k, v)), milliseconds(lambda: ring(k, v))]  # noqa: B023
    if rank == 0:
        tflops = 2 * length * length * HEADS * DIM / whole / 1e9
        cells = " | ".join(f"{ms:.2f}" for ms in (whole, *parts))
        print(f"| {length} | {world} | {cells} | {tflops:.3g} |", flush=True)
dist.destroy_process_group()
