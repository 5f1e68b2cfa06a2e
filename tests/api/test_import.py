"""Importing needs no GPU, no compiler, no network, and writes nothing."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import preflash
import pytest
from processes import python


def test_without_gpu_compiler_or_network(tmp_path):
    """The import starts no process and writes no file; neither CUDA nor an engine is touched,
    preflash.testing needs torch alone, fa2 is refused."""
    printed = python(
        """
        import sys, torch
        seen = []
        acts = "subprocess.Popen os.system os.posix_spawn os.fork os.mkdir socket.connect".split()
        def hook(event, args):
            writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if writes or event in acts:
                seen.append((event, args))
        sys.dont_write_bytecode = True
        sys.addaudithook(hook)
        import preflash, preflash.testing
        import preflash.integrations.sglang, preflash.integrations.vllm
        assert not seen, seen
        unused = ("pytest", "scipy", "sglang", "vllm", "transformers")
        print(torch.cuda.is_initialized(), [name for name in unused if name in sys.modules])
        q = torch.ones(3, 2, 64); kv = torch.ones(5, 1, 64)
        print(preflash.single_prefill_with_kv_cache(q, kv, kv, causal=True).sum().item())
        try:
            work = torch.empty(1024, dtype=torch.uint8)
            w = preflash.BatchPrefillWithRaggedKVCacheWrapper(work, backend="fa2")
            i = torch.tensor([0, 4], dtype=torch.int32)
            w.plan(i, i, 2, 1, 64)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            print("refused:", error)
        """,
        HOME=str(tmp_path), PATH="", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert re.fullmatch(r"False \[\]\n384\.0\nrefused:.*fa2.*", printed.strip(), re.S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["norm", "sampling", "rope", "BatchMLAPagedAttentionWrapper"])
def test_names_that_are_not_served_say_where_they_are(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*patch_flashinfer\(\)"):
        getattr(preflash, name)
    assert not hasattr(preflash, name)
    with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
        getattr(preflash, "_private")  # noqa: B009


def test_native_modules_need_neither_torch_nor_a_driver():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    for library in (preflash._core.__file__, *Path(preflash.__file__).parent.glob("lib/*.so*")):
        text = subprocess.check_output([readelf, "-d", library], text=True)
        needed = "".join(line for line in text.splitlines() if "NEEDED" in line)
        for name in ("libcuda.", "libcudart", "libtorch", "libc10", "libpython"):
            assert name not in needed, library


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
