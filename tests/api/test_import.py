"""Importing needs no GPU, no compiler, no network, and writes nothing."""

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import preflash
import pytest

# Variables that a module built by `make sanitize` needs to load.
_SANITIZER = ("LD_PRELOAD", "ASAN_OPTIONS")


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter with an empty PATH and no visible GPU."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name in ("PYTHONPATH", "LD_LIBRARY_PATH", *_SANITIZER)
    }
    env.update({"PATH": "", "CUDA_VISIBLE_DEVICES": "", "HOME": "/nonexistent", **environment})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A program, and a pattern of what it prints.
PROGRAMS = {
    "computes": (
        """
        import torch, preflash
        q = torch.ones(3, 2, 64); kv = torch.ones(5, 1, 64)
        print(preflash.single_prefill_with_kv_cache(q, kv, kv, causal=True).sum().item())
        """,
        "384.0",
    ),
    "refuses a GPU without one": (
        """
        import torch, preflash
        try:
            work = torch.empty(1024, dtype=torch.uint8)
            w = preflash.BatchPrefillWithRaggedKVCacheWrapper(work, backend="fa2")
            i = torch.tensor([0, 4], dtype=torch.int32)
            w.plan(i, i, 2, 1, 64)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            print("refused:", error)
        """,
        "refused:.*fa2.*",
    ),
    "no CUDA context": ("import preflash, torch; print(torch.cuda.is_initialized())", "False"),
    "testing needs torch alone": (
        """
        import sys
        import preflash.testing
        print([name for name in ("pytest", "scipy") if name in sys.modules])
        """,
        r"\[\]",
    ),
}


@pytest.mark.parametrize(("program", "prints"), PROGRAMS.values(), ids=PROGRAMS)
def test_without_gpu_or_compiler(program, prints):
    assert re.fullmatch(prints, python(program).strip(), re.S)


@pytest.mark.parametrize("name", ["norm", "sampling", "rope", "BatchMLAPagedAttentionWrapper"])
def test_names_that_are_not_served_say_where_they_are(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*patch_flashinfer\(\)"):
        getattr(preflash, name)
    assert not hasattr(preflash, name)
    with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
        getattr(preflash, "_private")  # noqa: B009


def test_import_starts_no_process_and_writes_no_file(tmp_path):
    python(
        """
        import sys
        seen = []
        def hook(event, args):
            if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork"):
                seen.append((event, args))
            if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
                seen.append((event, args))
            if event in ("os.mkdir", "socket.connect"):
                seen.append((event, args))
        import torch
        sys.dont_write_bytecode = True
        sys.addaudithook(hook)
        import preflash
        assert not seen, seen
        """,
        HOME=str(tmp_path),
    )
    assert list(tmp_path.iterdir()) == []


def test_native_modules_need_neither_torch_nor_a_driver():
    readelf = next(
        (p for p in (Path("/usr/bin/readelf"), Path("/usr/local/bin/readelf")) if p.exists()), None
    )
    if readelf is None:
        pytest.skip("readelf is not installed")
    root = Path(preflash.__file__).parent
    libraries = [Path(preflash._core.__file__), *root.glob("lib/*.so*")]
    for library in libraries:
        text = subprocess.run(
            [readelf, "-d", library], capture_output=True, text=True, check=True
        ).stdout
        needed = [line for line in text.splitlines() if "NEEDED" in line]
        for name in ("libcuda.", "libcudart", "libtorch", "libc10", "libpython"):
            assert not any(name in line for line in needed), (library, needed)


def test_an_extra_that_is_missing(monkeypatch):
    """The error holds the line that installs it, of an extra of this distribution."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "preflash.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"transformers.*pip install 'preflash\[transformers\]'$"):
        importlib.import_module("preflash.integrations.transformers")
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    for extra in ("transformers", "trace", "rich"):  # tests/cli has the lines of the others
        assert re.search(rf'^{extra} = \["', table, re.M)


def test_package_is_typed():
    assert (Path(preflash.__file__).parent / "py.typed").exists()
