"""A package index (PEP 503, PEP 658's hashes) of dist/, for any server of static files:

    python wheels/index.py [--install] dist public
    pip install preflash==0.1.0+cu130 --extra-index-url URL/cu130  # URL: where a server has public/

One folder for each CUDA version, because pip would take the largest local version of one index.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import html
import shutil
import subprocess
import sys
import tempfile
import threading
from email.parser import HeaderParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote
from zipfile import ZipFile

PAGE = """<!DOCTYPE html>
<html><head><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>
<body>
{links}
</body></html>
"""


def write(wheels: list[Path], out: Path) -> list[Path]:
    """Copies the wheels and writes the pages; the folders to give to --extra-index-url.

    Raises:
        ValueError: a wheel has no local version, such as +cu130.
    """
    by_cuda: dict[str, list[Path]] = {}
    for wheel in sorted(wheels):
        _, plus, local = wheel.name.split("-")[1].partition("+")
        if not plus:
            raise ValueError(f"{wheel.name}: its version names no CUDA version, as 1.0+cu130")
        by_cuda.setdefault(local, []).append(wheel)
    for local, own in by_cuda.items():
        folder = out / local / "preflash"
        folder.mkdir(parents=True, exist_ok=True)
        links = [_link(Path(shutil.copy2(wheel, folder / wheel.name))) for wheel in own]
        (folder / "index.html").write_text(PAGE.format(title="preflash", links="\n".join(links)))
        root = '<a href="preflash/">preflash</a>'
        (folder.parent / "index.html").write_text(PAGE.format(title=local, links=root))
    return [out / local for local in by_cuda]


def _link(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        python = HeaderParser().parsestr(archive.read(name).decode())["Requires-Python"]
    needs = f' data-requires-python="{html.escape(python)}"' if python else ""
    return f'<a href="{quote(wheel.name)}#sha256={digest}"{needs}>{html.escape(wheel.name)}</a><br>'


def installed(folder: Path) -> str:
    """Pip-installs from a loopback server of the folder; returns the release and module names.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel, or one that its hash does not fit.
    """
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder.parent))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory() as target,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
        url = f"http://127.0.0.1:{server.server_port}/{folder.name}"
        # NOTE: the index of other packages stays in force, as for a user.
        run = [*pip, "--no-cache-dir", "--extra-index-url", url, "preflash"]
        subprocess.run(run, check=True)
        server.shutdown()
        (module,) = Path(target).glob("preflash/_core.*.so")
        (info,) = Path(target).glob("preflash-*.dist-info")
        return f"{info.name.removesuffix('.dist-info')}, {module.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="where the wheels are")
    parser.add_argument("out", type=Path, help="what the server serves")
    parser.add_argument(
        "--install", action="store_true", help="let pip install each for this Python, then"
    )
    arguments = parser.parse_args()
    for folder in write(list(arguments.dist.glob("*.whl")), arguments.out):
        print(f"{folder}: pip installs {installed(folder)}" if arguments.install else folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
