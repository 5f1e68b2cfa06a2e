"""The tests that concern a GPU, all on one, in processes of one thread each and in random order,
with a report: `make test-gpu`, or `python tools/gpu_suite.py --workers 12 --seed 11 [tests]`.

pytest-xdist runs the processes; a test in which one of them dies is a failure with a name.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "dev" / "gpu_suite.md"
# Of the folders beside the first two, what looks at the GPU or at what is compiled for it.
TESTS = ("tests/gpu", "tests/api", "tests/fuzz/test_fuzz.py", "tests/codegen/test_registry.py")


def pytest_addoption(parser) -> None:
    parser.addoption("--order", type=int, help="seed of the order of tests")


def pytest_collection_modifyitems(config, items: list) -> None:
    """Shuffles the tests where this module is a plugin of pytest (-p gpu_suite)."""
    items.sort(key=lambda item: item.nodeid)
    random.Random(config.getoption("order")).shuffle(items)


def main() -> int:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--workers", type=int, default=12, help="processes at once")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of the order")
    parser.add_argument("--report", type=pathlib.Path, default=REPORT)
    parser.add_argument("--variants", type=pathlib.Path, help="variants.json of the build")
    parser.add_argument("--commit", help="of a copy of the checkout, where git knows none")
    parser.add_argument("tests", nargs="*", default=TESTS, help="and other arguments of pytest")
    args, more = parser.parse_known_args()
    args.tests = [*args.tests, *more]
    machine = _machine()
    if args.report.resolve() == REPORT and machine["GPU"] == "none":
        parser.error(f"no GPU here, and {REPORT.name} is of one: name another --report")
    print(f"seed {args.seed}, {args.workers} processes", flush=True)
    start = time.monotonic()
    code, results = _run(args)
    seconds = round(time.monotonic() - start)
    failures, skips = _failures(results), _skips(results)
    if code not in (0, 1) or (code and not failures):  # and tests that never ran
        failures.append("nothing was collected" if code == 5 else f"pytest ended with code {code}")
    facts = {
        "commit": args.commit or _commit(args.report),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        **machine,
        "build": _build(args.variants),
        "tests": " ".join(args.tests),
        "seed": args.seed,
        "processes": args.workers,
        "seconds": seconds,
        "passed": sum(len(result) == 0 for result in results),
        "failed": len(failures),
        "skipped": skips.total(),
    }
    args.report.write_text(_text(facts, failures, skips))
    print(f"report: {args.report}")
    return 1 if failures else 0


def _run(args: argparse.Namespace) -> tuple[int, list[ElementTree.Element]]:
    """Returns pytest's exit code and the test cases of its report in XML."""
    here = str(pathlib.Path(__file__).parent)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(args.seed),  # every process collects the same ids
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_suite", "-p", "no:cacheprovider"]
    command += ["-n", str(args.workers), "--dist", "worksteal", "--tb=short", "--disable-warnings"]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "results.xml"
        command += ["--order", str(args.seed), "-o", "junit_family=xunit1", f"--junitxml={report}"]
        code = subprocess.run([*command, *args.tests], env=environment, check=False).returncode
        results = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        return code, list(results)


def _failures(results: list[ElementTree.Element]) -> list[str]:
    found = set()
    for result in results:
        for problem in (*result.iter("failure"), *result.iter("error")):
            ran = problem.get("message") != "collection failure"
            after = f"::{result.get('name')}" if ran else " (not collected)"
            found.add(result.get("file") + after)
    return sorted(found)


def _skips(results: list[ElementTree.Element]) -> collections.Counter[str]:
    """Returns the reasons of skips, without what differs from test to test."""
    reasons = collections.Counter()
    for result in results:
        for skip in result.iter("skipped"):
            text = skip.get("message", "").strip() or "no reason given"
            first = text.partition(". Compiled for it")[0].splitlines()[0]
            reasons[re.sub(r"(not compiled in this build): .*", r"\1", first)[:160]] += 1
    return reasons


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit(report: pathlib.Path) -> str:
    found = _output("git", "rev-parse", "--short=10", "HEAD")
    others = [":/"]
    if report.resolve().is_relative_to(ROOT):  # the report of the run before is no change
        others.append(f":(top,exclude){report.resolve().relative_to(ROOT)}")
    changed = _output("git", "status", "--porcelain", "--", *others)
    return (found or "not a git checkout") + (" + changes" if found and changed else "")


def _machine() -> dict[str, str]:
    import torch

    gpu, versions = "none", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} visible"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = _output(*query).partition("\n")[0]
    return {"GPU": gpu, "driver": driver or "none", "torch": versions}


def _build(variants: pathlib.Path | None) -> str:
    from preflash import _core

    by_backend = collections.Counter(kernel["backend"] for kernel in _core.kernels())
    counts = ", ".join(f"{count} of {name}" for name, count in sorted(by_backend.items()))
    preset = "unknown preset"
    if variants and variants.exists():
        preset = f"preset {json.loads(variants.read_text())['preset']}"
    cuda = f", kernels of CUDA {_core.cuda_version()}" if _core.cuda_version() else ""
    return f"{preset}, variants: {counts}{cuda}"


def _text(facts: dict, failures: list[str], skips: collections.Counter[str]) -> str:
    lines = ["# The tests on a GPU", "", "Written by `make test-gpu`.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "## Failed", ""]
    lines += [f"* `{name}`" for name in failures] or ["None."]
    lines += ["", "## Skipped", "", "A skipped test proves nothing.", ""]
    lines += [f"* {count}: {reason}" for reason, count in skips.most_common()] or ["None."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
