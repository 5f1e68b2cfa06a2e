"""Milliseconds of one causal prefill over the GPUs of this machine.

torchrun --standalone --nproc-per-node 2 docs/examples/context_parallel.py 65536 262144
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from preflash.distributed import context_parallel_prefill

HEADS, KV_HEADS, DIM, REPEATS = 32, 8, 128, 5

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
world = dist.get_world_size()
dtype = torch.bfloat16 if on_gpu else torch.float32
for length in map(int, sys.argv[1:] or ["65536" if on_gpu else "1024"]):
    shapes = [(length // world, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    times = []
    for _ in range(REPEATS + 1):  # the first loads kernels and connects
        dist.barrier()
        begin = time.perf_counter()
        context_parallel_prefill(q, k, v)
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    if dist.get_rank() == 0:
        ms = statistics.median(times[1:])
        tflops = 2 * length * length * HEADS * DIM / ms / 1e9
        print(f"{length} tokens on {world} ranks: {ms:.2f} ms, {tflops:.3g} TFLOP/s", flush=True)
dist.destroy_process_group()
