"""Compiler launcher for CUDA sources: keeps ptxas's report and what the compile cost.

    compile_report.py REPORT_DIR nvcc ... -c source.cu -o object.o
    compile_report.py REPORT_DIR --sum

Runs the compiler. ptxas's lines (registers, spills, warnings) go to REPORT_DIR/<source>.ptxas, and
REPORT_DIR/<source>.json gets seconds, the peak memory of its largest process and the object's size.
Everything else that the compiler says is passed on, and so are ptxas's warnings. --sum prints what
all sources of REPORT_DIR cost when each was compiled last.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

QUIET_PREFIXES = ("ptxas info", "    ")  # indented lines continue a ptxas line: stack, spills


def sum_up(report_dir: Path) -> str:
    costs = [json.loads(path.read_text()) for path in sorted(report_dir.glob("*.json"))]
    minutes = sum(cost["seconds"] for cost in costs) / 60
    peak = max((cost["peak_mib"] for cost in costs), default=0) / 1024
    slowest = max(costs, key=lambda cost: cost["seconds"], default={"source": "-", "seconds": 0})
    return (
        f"preflash: {len(costs)} CUDA sources took {minutes:.1f} core-minutes, {peak:.1f} GiB at "
        f"most; the slowest is {slowest['source']}, {slowest['seconds']:.0f} s"
    )


def main(report_dir: Path, command: Sequence[str]) -> int:
    if command == ["--sum"]:
        print(sum_up(report_dir))
        return 0
    source = Path(next((word for word in command if word.endswith(".cu")), ""))
    start = time.monotonic()
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    seconds = time.monotonic() - start

    lines = finished.stderr.splitlines()
    passed_on = [line for line in lines if not line.startswith(QUIET_PREFIXES)]
    if finished.returncode != 0:
        passed_on = lines
    if passed_on:
        print("\n".join(passed_on), file=sys.stderr)

    if finished.returncode == 0 and source.name and "-o" in command:
        target = Path(command[command.index("-o") + 1])
        report_dir.mkdir(parents=True, exist_ok=True)
        (report_dir / f"{source.stem}.ptxas").write_text(finished.stderr)
        cost = {
            "source": source.name,
            "seconds": round(seconds, 1),
            # Kilobytes on Linux; the largest process of the compile, not their sum.
            "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
            "object_kib": target.stat().st_size // 1024 if target.is_file() else 0,
        }
        (report_dir / f"{source.stem}.json").write_text(json.dumps(cost) + "\n")
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
