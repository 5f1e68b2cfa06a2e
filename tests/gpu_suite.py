"""The tests that concern a GPU, all on one, in processes of one thread each and in random order,
with a report: `make test-gpu`, or `python tests/gpu_suite.py --workers 12 --seed 11 [tests]`.

As a plugin of pytest, below, it shuffles and writes the report. pytest-xdist runs the processes; a
test in which one of them dies is a failure with a name.
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
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "dev" / "gpu_suite.md"
# Of the folders beside the first two, what looks at the GPU or at what is compiled for it.
TESTS = (
    "tests/gpu",
    "tests/api",
    "tests/fuzz/test_fuzz.py",
    "tests/codegen/test_registry.py",
)
_SETTINGS = "PREFLASH_GPU_SUITE"  # JSON, for the plugin in every process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--workers", type=int, default=12, help="processes at once")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of the order")
    parser.add_argument("--report", type=pathlib.Path, default=REPORT)
    parser.add_argument("--variants", type=pathlib.Path, help="variants.json of the build")
    parser.add_argument("--commit", help="of a copy of the checkout, where git knows none")
    parser.add_argument("tests", nargs="*", default=TESTS, help="and other arguments of pytest")
    args, more = parser.parse_known_args()
    if args.report.resolve() == REPORT and not _has_gpu():
        parser.error(f"no GPU here, and {REPORT.name} is of one: name another --report")
    settings = {
        "seed": args.seed,
        "workers": args.workers,
        "report": str(args.report.resolve()),
        "variants": args.variants and str(args.variants.resolve()),
        "commit": args.commit,
        "tests": " ".join([*args.tests, *more]),
    }
    here = str(pathlib.Path(__file__).parent)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        _SETTINGS: json.dumps(settings),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(args.seed),  # every process collects the same ids
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_suite", "-p", "no:cacheprovider"]
    command += ["-n", str(args.workers), "--dist", "worksteal", "--tb=short", "--disable-warnings"]
    print(f"seed {args.seed}, {args.workers} processes", flush=True)
    return subprocess.run([*command, *args.tests, *more], env=environment, check=False).returncode


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# --- the plugin ------------------------------------------------------------------


def pytest_configure(config) -> None:
    if _SETTINGS not in os.environ:
        return
    settings = json.loads(os.environ[_SETTINGS])
    config.pluginmanager.register(Order(settings["seed"]))
    if not hasattr(config, "workerinput"):  # the process that the reports come to
        config.pluginmanager.register(Results(settings))


class Order:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: item.nodeid)
        random.Random(self._seed).shuffle(items)


class Results:
    """Outcomes of all collected tests, and the report of them."""

    def __init__(self, settings: dict) -> None:
        self._settings = settings
        self._start = time.monotonic()
        self._outcomes: dict[str, str] = {}
        self._skips: collections.Counter[str] = collections.Counter()
        self._errors: list[str] = []  # of files that could not be collected
        self._collected: set[str] = set()

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected.update(ids)

    def pytest_collectreport(self, report) -> None:
        if report.failed and report.nodeid not in self._errors:
            self._errors.append(report.nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:  # in any phase, or its process died
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped and self._outcomes.setdefault(report.nodeid, "skipped") == "skipped":
            self._skips[_reason(report)] += 1
        elif report.passed and report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self, session) -> None:
        counts = collections.Counter(self._outcomes.values())
        failures = sorted(name for name, is_ in self._outcomes.items() if is_ == "failed")
        not_run = sorted(self._collected - set(self._outcomes))
        failures += [f"{name} (not collected)" for name in self._errors]
        failures += [f"{name} (never ran)" for name in not_run]
        if not self._outcomes and not failures:
            failures = ["nothing was collected"]
        facts = self._facts(counts, len(failures))
        text = _text(facts, failures, self._skips)
        pathlib.Path(self._settings["report"]).write_text(text)
        if failures and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.write_line(f"report: {self._settings['report']}")

    def _facts(self, counts: collections.Counter[str], failed: int) -> dict[str, object]:
        seconds = time.monotonic() - self._start
        return {
            "commit": self._settings["commit"] or _commit(self._settings["report"]),
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            **_machine(),
            "build": _build(self._settings["variants"]),
            "tests": self._settings["tests"],
            "seed": self._settings["seed"],
            "processes": self._settings["workers"],
            "seconds": round(seconds),
            "passed": counts["passed"],
            "failed": failed,
            "skipped": counts["skipped"],
        }


def _reason(report) -> str:
    """Reason of a skip, without what differs from test to test."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    text = text.removeprefix("Skipped: ").strip() or "no reason given"
    first = text.partition(". Compiled for it")[0].splitlines()[0]
    return re.sub(r"(not compiled in this build): .*", r"\1", first)[:160]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit(report: str) -> str:
    found = _output("git", "rev-parse", "--short=10", "HEAD")
    others = [":/"]
    if pathlib.Path(report).is_relative_to(ROOT):  # the report of the run before is no change
        others.append(f":(top,exclude){pathlib.Path(report).relative_to(ROOT)}")
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


def _build(variants: str | None) -> str:
    from preflash import _core

    by_backend = collections.Counter(kernel["backend"] for kernel in _core.kernels())
    counts = ", ".join(f"{count} of {name}" for name, count in sorted(by_backend.items()))
    preset = "unknown preset"
    if variants and pathlib.Path(variants).exists():
        preset = f"preset {json.loads(pathlib.Path(variants).read_text())['preset']}"
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
