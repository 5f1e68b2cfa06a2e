"""`info`: what is installed, what this machine has, and what backend="auto" picks and why."""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform

import torch

import preflash

from .. import _core
from .._cudnn import graph
from .._device import backends
from .console import Table
from .machine import cpu_refusal, gpu_absent, has_gpu_kernels


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def execute(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else _text(facts))
    return 0


def collect() -> dict:
    """Everything that `info` tells, as JSON types."""
    gpus = _gpus()
    devices = [torch.device("cuda", gpu["device"]) for gpu in gpus]
    return {
        "preflash": preflash.__version__,
        "kernel_abi": _core.abi_version,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "build": "gpu and cpu" if has_gpu_kernels() else "cpu alone",
        "cuda": _core.cuda_version() or None,
        "cudnn_absent": graph.why_missing(),
        "gpu_absent": gpu_absent() or None,
        "kernels": dict(collections.Counter(kernel["family"] for kernel in _core.kernels())),
        "gpus": gpus,
        "cpu": _cpu(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PREFLASH_")},
        "auto": [_auto(device) for device in [*devices, torch.device("cpu")]],
    }


def _gpus() -> list[dict]:
    if gpu_absent():
        return []
    return [_core.device_facts(index) for index in range(_core.cuda_device_count())]


def _cpu() -> dict:
    refusal = cpu_refusal()
    return {
        "isa": None if refusal else _core.cpu_isa(),
        "threads": torch.get_num_threads(),
        "refusal": refusal or None,
    }


def _auto(device: torch.device) -> dict:
    """What auto picks for a plain bfloat16 problem of head_dim 128, and what it passed over."""
    options = _core.AttentionOptions(
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim_qk=128,
        head_dim_vo=128,
        q_dtype=_core.DType.bfloat16,
        kv_dtype=_core.DType.bfloat16,
        o_dtype=_core.DType.bfloat16,
        causal=True,
        window_left=-1,
        mask=_core.Mask.bounds,
        position=_core.Position.none,
        rope_scale=1.0,
        rope_theta=1e4,
        soft_cap=0.0,
        fixed_split_size=0,
        disable_split=False,
    )
    reasons = []
    for backend in backends.candidates("auto", device):
        refusal = backend.supports(device, options)
        if refusal is None:
            rule = "CPU tensors" if device.type == "cpu" else "the best that serves this GPU"
            return {"device": str(device), "backend": backend.name, "why": [*reasons, rule]}
        reasons.append(f"not {backend.name}: {refusal}")
    return {"device": str(device), "backend": None, "why": reasons}


def _text(facts: dict) -> str:
    kernels = ", ".join(f"{family}: {count}" for family, count in facts["kernels"].items())
    lines = [
        f"preflash  {facts['preflash']}, kernel ABI {facts['kernel_abi']}",
        f"kernels   {kernels} (python -m preflash variants)",
        f"CUDA      {_cuda_line(facts)}",
        f"cuDNN     {_cudnn_line(facts)}",
        f"torch     {facts['torch']}, CUDA {facts['torch_cuda'] or 'none: a CPU build'}",
        f"Python    {facts['python']}, {facts['platform']}",
        f"CPU       {_cpu_line(facts['cpu'])}",
    ]
    for name, value in facts["environment"].items():
        lines.append(f"{name}={value} in the environment")
    if facts["gpus"]:
        lines += ["", str(_gpu_table(facts["gpus"]))]
    lines += ["", "backend='auto' with bfloat16, head_dim 128, causal:"]
    for choice in facts["auto"]:
        lines.append(f"  {choice['device']}: {choice['backend'] or 'nothing'}")
        lines += [f"    {reason}" for reason in choice["why"]]
    return "\n".join(lines)


def _cpu_line(cpu: dict) -> str:
    if cpu["refusal"]:
        return f"not used: {cpu['refusal']}"
    return f"{cpu['isa']}, {cpu['threads']} threads"


def _cuda_line(facts: dict) -> str:
    libraries = f"kernel libraries of CUDA {facts['cuda']}" if facts["cuda"] else ""
    absent = f"not used: {facts['gpu_absent']}" if facts["gpu_absent"] else ""
    return "; ".join(part for part in (libraries, absent) if part)


def _cudnn_line(facts: dict) -> str:
    absent = facts["cudnn_absent"]
    return f"not used: {absent}" if absent else "backend='cudnn' of the batch wrappers"


def _gpu_table(gpus: list[dict]) -> Table:
    headers = ["GPU", "name", "compute capability", "SMs", "L2 MiB", "smem/block KiB"]
    table = Table(headers, frozenset(headers[2:]))
    for gpu in gpus:
        capability = gpu["compute_capability"]
        table.add(
            gpu["device"],
            gpu["name"],
            f"{capability // 10}.{capability % 10}",
            gpu["num_sms"],
            gpu["l2_bytes"] // 2**20,
            gpu["smem_per_block"] // 2**10,
        )
    return table
