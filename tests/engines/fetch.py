"""Fetches Python files of engines from PyPI and GitHub: python tests/engines/fetch.py --help."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

NEWEST = (
    "vllm==0.33.0",
    "sglang==0.5.23",
    "rtp_llm@4b8d39cd5cbe4eff0cf0661411e15be21ccc58b9",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a directory; each release gets one in it")
    parser.add_argument(
        "releases", nargs="*", default=NEWEST, help="such as vllm==0.33.0, rtp_llm@COMMIT"
    )
    help_archive = "the same as a .txz, for a machine without PyPI"
    parser.add_argument("--archive", type=Path, help=help_archive)
    options = parser.parse_args()
    for release in options.releases:
        (check_out if "@" in release else download)(release, options.out)
    if options.archive:
        with tarfile.open(options.archive, "w:xz") as archive:
            archive.add(options.out, arcname=".")


def download(release: str, out: Path) -> None:
    """Extracts from a wheel the attention backends and what they import, not the models."""
    with tempfile.TemporaryDirectory() as directory:
        # Nothing of it is run but Python files, so any platform's wheel does.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", directory]
        command += ["--only-binary=:all:", "--python-version=3.12", release]
        subprocess.run(command, check=True)
        (wheel,) = Path(directory).iterdir()
        name, version = wheel.name.split("-")[:2]
        with zipfile.ZipFile(wheel) as file:
            for member in file.namelist():
                wanted = member.endswith(".py") and member.startswith(WANTED[name])
                if wanted or member.endswith(".dist-info/METADATA"):
                    file.extract(member, out / f"{name}-{version}")


def check_out(release: str, out: Path) -> None:
    """Checks out a commit of an engine that PyPI does not have."""
    name, _, commit = release.partition("@")
    target = out / f"{name}-{commit[:9]}"
    git = ["git", "-C", str(target)]
    subprocess.run(["git", "init", "-q", str(target)], check=True)
    fetch = ["fetch", "-q", "--depth=1", "--filter=blob:none", REPOSITORIES[name], commit]
    subprocess.run([*git, *fetch], check=True)
    subprocess.run([*git, "checkout", "-q", "FETCH_HEAD", "--", *WANTED[name]], check=True)
    shutil.rmtree(target / ".git")


REPOSITORIES = {"rtp_llm": "https://github.com/alibaba/rtp-llm"}
WANTED = {
    "vllm": ("vllm/utils/", "vllm/v1/"),
    "sglang": (
        "sglang/srt/layers/attention/",
        "sglang/srt/layers/radix_attention.py",
        "sglang/srt/model_executor/",
    ),
    "rtp_llm": ("rtp_llm/models_py/modules/factory/attention/",),
}

if __name__ == "__main__":
    main()
