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
from .._device import backends
from .console import Table
from .machine import cpu_refusal, gpu_absent, has_gpu_kernels


def execute(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else _text(facts))
    return 0


def collect() -> dict:
    """Everything that `info` prints, as JSON types."""
    absent, refusal = gpu_absent(), cpu_refusal()
    gpus = [] if absent else [_core.device_facts(i) for i in range(_core.cuda_device_count())]
    isa = None if refusal else _core.cpu_isa()
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
        "gpu_absent": absent or None,
        "kernels": dict(collections.Counter(kernel["family"] for kernel in _core.kernels())),
        "gpus": gpus,
        "cpu": {"isa": isa, "threads": torch.get_num_threads(), "refusal": refusal or None},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PREFLASH_")},
        "auto": [_auto(device) for device in [*devices, torch.device("cpu")]],
    }


def _auto(device: torch.device) -> dict:
    """Backend that auto picks for a plain bfloat16 problem of head_dim 128, and the reasons."""
    dtype = _core.DType.bfloat16
    dtypes = dict.fromkeys(["q_dtype", "kv_dtype", "o_dtype"], dtype)
    sizes = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128}
    options = _core.AttentionOptions(**sizes, **dtypes, causal=True)
    reasons = []
    for backend in backends.candidates("auto", device):
        refusal = backend.why_unsupported(device, options)
        if refusal is None:
            rule = "CPU tensors" if device.type == "cpu" else "the best that serves this GPU"
            return {"device": str(device), "backend": backend.name, "why": [*reasons, rule]}
        reasons.append(f"not {backend.name}: {refusal}")
    return {"device": str(device), "backend": None, "why": reasons}


def _text(facts: dict) -> str:
    kernels = ", ".join(f"{family}: {count}" for family, count in facts["kernels"].items())
    cpu, gpu = facts["cpu"], facts["gpu_absent"]
    cuda = [f"kernel libraries of CUDA {facts['cuda']}"] if facts["cuda"] else []
    cuda += [f"not used: {gpu}"] if gpu else []
    on_cpu = f"{cpu['isa']}, {cpu['threads']} threads"
    lines = [
        f"preflash  {facts['preflash']}, kernel ABI {facts['kernel_abi']}",
        f"kernels   {kernels} (python -m preflash variants)",
        f"CUDA      {'; '.join(cuda)}",
        f"torch     {facts['torch']}, CUDA {facts['torch_cuda'] or 'none: a CPU build'}",
        f"Python    {facts['python']}, {facts['platform']}",
        f"CPU       {_unless(cpu['refusal'], on_cpu)}",
    ]
    for name, value in facts["environment"].items():
        wrong = name == backends.OVERRIDE and value not in backends.NAMES
        why = f": every call raises, it must be one of {', '.join(backends.NAMES)}" if wrong else ""
        lines.append(f"{name}={value} in the environment{why}")
    if facts["gpus"]:
        lines += ["", str(_gpu_table(facts["gpus"]))]
    lines += ["", "backend='auto' with bfloat16, head_dim 128, causal:"]
    for choice in facts["auto"]:
        lines.append(f"  {choice['device']}: {choice['backend'] or 'nothing'}")
        lines += [f"    {reason}" for reason in choice["why"]]
    return "\n".join(lines)


def _unless(refusal: str | None, fact: str) -> str:
    return f"not used: {refusal}" if refusal else fact


def _gpu_table(gpus: list[dict]) -> Table:
    sizes = dict.fromkeys(["compute capability", "SMs", "L2 MiB", "smem/block KiB"], "d")
    table = Table({"GPU": "", "name": "", **sizes})
    for gpu in gpus:
        capability = "{}.{}".format(*divmod(gpu["compute_capability"], 10))
        sizes = (gpu["l2_bytes"] // 2**20, gpu["smem_per_block"] // 2**10)
        table.add(gpu["device"], gpu["name"], capability, gpu["num_sms"], *sizes)
    return table
