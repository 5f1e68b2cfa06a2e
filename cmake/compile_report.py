"""Compiler launcher for CUDA sources: keeps ptxas's report and what the compile cost.

    compile_report.py REPORT_DIR nvcc ... -c source.cu -o object.o

Runs the compiler. ptxas's lines (registers, spills, warnings) go to REPORT_DIR/<source>.ptxas, and
REPORT_DIR/<source>.json gets seconds, the peak memory of its largest process and the object's size.
Everything else that the compiler says is passed on, and so are ptxas's warnings.
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


def main(report_dir: Path, command: Sequence[str]) -> int:
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
            # NOTE: kilobytes on Linux; the largest process of the compile, not their sum.
            "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
            "object_kib": target.stat().st_size // 1024 if target.is_file() else 0,
        }
        (report_dir / f"{source.stem}.json").write_text(json.dumps(cost) + "\n")
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
