"""wheels/index.py: pip installs from what it writes, out of the folder of one CUDA version."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from pathlib import Path

import index
import pytest
from processes import finished
from test_check import packed


def wheel(directory: Path, version: str) -> Path:
    """Writes a wheel that any Python takes, of a package that knows its version."""
    package = directory / version
    package.mkdir()
    (package / "__init__.py").write_text(f"version = {version!r}\n")
    return packed(package, directory, "py3-none-any", version=version)


@pytest.fixture
def served(tmp_path):
    wheels = [wheel(tmp_path, f"0.1.0+{local}") for local in ("cu129", "cu130")]
    index.write(wheels, tmp_path / "public")
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "public")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pip_install(served, tmp_path, local):
    """Installs from the folder of a CUDA version into a directory of its name."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir")
    source = ("--target", tmp_path / local, "--index-url", f"{served}/{local}")
    return finished(*pip, *source, "preflash")


def test_pip_installs_the_cuda_version_of_the_folder(served, tmp_path):
    for local in ("cu129", "cu130"):
        run = pip_install(served, tmp_path, local)
        assert run.returncode == 0, run.stderr
        text = (tmp_path / local / "preflash" / "__init__.py").read_text()
        assert text == f"version = '0.1.0+{local}'\n"


def test_a_wheel_without_a_cuda_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"1\.0\+cu130"):
        index.write([wheel(tmp_path, "0.1.0")], tmp_path / "public")


def test_a_changed_wheel_is_noticed(served, tmp_path):
    (path,) = (tmp_path / "public" / "cu130" / "preflash").glob("*.whl")
    path.write_bytes(path.read_bytes() + b"\0")
    run = pip_install(served, tmp_path, "cu130")
    assert run.returncode != 0
    assert "DO NOT MATCH THE HASHES" in run.stderr
