"""preflash.patch_flashinfer() replaces names of a synthetic flashinfer, and of the real one where
it is installed."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import preflash
import pytest
import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
SINGLE = "single_prefill_with_kv_cache"


def stand_ins(functions: str, classes: str = "") -> str:
    """Writes functions that return whose they are, and empty classes."""
    lines = [f"def {name}(*args, **options): return 'theirs'" for name in functions.split()]
    lines += [f"class {name}: pass" for name in classes.split()]
    return "\n".join([*lines, ""])


PACKAGE = {
    "flashinfer/__init__.py": """
        __version__ = "9.8.7"
        from . import attention
        from .cascade import merge_state
        from .decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
        from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
        from .quantization import packbits
    """,
    "flashinfer/prefill.py": stand_ins(f"{SINGLE} trtllm_ragged_attention_deepseek", PREFILL)
    + f"from functools import partial\n{SINGLE}_return_lse = partial({SINGLE})",
    "flashinfer/decode.py": stand_ins("fast_decode_plan cudnn_batch_decode_with_kv_cache", DECODE),
    "flashinfer/cascade.py": stand_ins("merge_state") + "merge_states = None",
    "flashinfer/attention/__init__.py": "from ._core import BatchAttention",
    "flashinfer/attention/_core.py": stand_ins("", "BatchAttention"),
    # A submodule has the name of a function, in the real package too.
    "flashinfer/quantization/__init__.py": """
        from .packbits import packbits
        from . import segment_packbits
    """,
    "flashinfer/quantization/packbits.py": stand_ins("packbits"),
    "flashinfer/quantization/segment_packbits.py": "",
    "serving_engine.py": """
        import flashinfer
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
        from flashinfer.cascade import merge_state as merge
        from flashinfer.quantization import packbits as _pack
    """,
    "flashinfer/late.py": f"from flashinfer.decode import {DECODE}",
    "late_engine.py": f"from flashinfer.decode import {DECODE}",
}


def of_package(name: str) -> bool:
    return name.partition(".")[0] in ("flashinfer", "serving_engine", "late_engine")


@pytest.fixture
def no_flashinfer(monkeypatch):
    """Forgets the modules of a flashinfer that a test imports; a real one comes back."""
    with monkeypatch.context() as context:
        for name in filter(of_package, list(sys.modules)):
            context.delitem(sys.modules, name)
        yield context
        for name in filter(of_package, list(sys.modules)):
            del sys.modules[name]


@pytest.fixture
def flashinfer(tmp_path, no_flashinfer):
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    no_flashinfer.syspath_prepend(str(tmp_path))
    return importlib.import_module("flashinfer")


@pytest.fixture
def engine(flashinfer):
    return importlib.import_module("serving_engine")


def attributes():
    """Returns the identity of every attribute of the imported modules of the package."""
    return {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        for key, value in list(getattr(module, "__dict__", {}).items())
        if of_package(name) and key != "__builtins__"
    }


REPLACED = {
    "flashinfer": [DECODE, PREFILL, "fast_decode_plan", "merge_state", "packbits", SINGLE],
    "flashinfer.attention": ["BatchAttention"],
    "flashinfer.attention._core": ["BatchAttention"],
    "flashinfer.cascade": ["merge_state"],
    "flashinfer.decode": [DECODE, "cudnn_batch_decode_with_kv_cache", "fast_decode_plan"],
    "flashinfer.prefill": [PREFILL, SINGLE, f"{SINGLE}_return_lse"],
    "flashinfer.quantization": ["packbits"],
    "flashinfer.quantization.packbits": ["packbits"],
    "serving_engine": [DECODE, "fast_decode_plan", "merge", "_pack"],
}


def test_every_module_that_holds_a_served_name_gets_ours(flashinfer, engine):
    before = attributes()
    with preflash.patch_flashinfer() as patch:
        assert patch.reason is None
        after = attributes()
        ours = {(r.module.__name__, r.name): r.new for r in patch.replaced}
        assert engine.merge is flashinfer.merge_state is preflash.merge_state
        assert engine._pack is flashinfer.packbits is preflash.packbits
        assert all(after[key] == id(new) for key, new in ours.items())
        for piece in (
            "flashinfer 9.8.7", "in effect", "preflash.decode.fast_decode_plan in flashinfer",
            "serving_engine (as merge)", *REPLACED,
        ):  # fmt: skip
            assert piece in repr(patch)
    assert "undone" in repr(patch)
    assert ours.keys() == {(home, n) for home, names in REPLACED.items() for n in names}
    assert after.keys() == before.keys()
    assert {key for key in before if before[key] != after[key]} == ours.keys()
    aliases = ("merge", "_pack")
    assert all(new.__name__ == name for (_, name), new in ours.items() if name not in aliases)


def test_undo_restores_every_object(flashinfer, engine):
    """A second patch changes nothing and undoes nothing."""
    before = attributes()
    patch = preflash.patch_flashinfer()
    assert patch.replaced
    patched = attributes()
    assert patched != before
    with preflash.patch_flashinfer() as second:
        assert attributes() == patched
        assert second.replaced == []
        assert "already" in second.reason
        assert "already" in repr(second)
    assert attributes() == patched
    for _ in range(2):
        patch.undo()
        assert attributes() == before
    with pytest.raises(KeyError), preflash.patch_flashinfer():
        raise KeyError
    assert attributes() == before
    patch = preflash.patch_flashinfer()
    flashinfer.merge_state = mine = object()  # is left alone
    patch.undo()
    assert flashinfer.merge_state is mine
    assert flashinfer.cascade.merge_state.__module__ == "flashinfer.cascade"


def test_modules_imported_while_patched(flashinfer):
    original = getattr(flashinfer, DECODE)
    with preflash.patch_flashinfer():
        late = importlib.import_module("flashinfer.late")
        engine = importlib.import_module("late_engine")
        ours = preflash.BatchDecodeWithPagedKVCacheWrapper
        assert getattr(late, DECODE) is getattr(engine, DECODE) is ours
    assert getattr(late, DECODE) is original
    # Documented: it cannot be told from an import of preflash's own.
    assert getattr(engine, DECODE) is ours


def test_modules_that_load_themselves_are_not_loaded(flashinfer, no_flashinfer, tmp_path):
    tmp_path.joinpath("serving_engine.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.find_spec("serving_engine")
    loader = importlib.util.LazyLoader(spec.loader)
    no_flashinfer.setitem(sys.modules, spec.name, module := importlib.util.module_from_spec(spec))
    loader.exec_module(module)
    with preflash.patch_flashinfer() as patch:
        assert patch.replaced


NO_ARRAY = torch.tensor([0], dtype=torch.int32)
# Calls with a wrapper that was made before the patch, and their refusals.
REFUSED = [
    (lambda old: preflash.fast_decode_plan(old, *[NO_ARRAY] * 3, 4, 2, 64, 16), TypeError,
     r"flashinfer\.decode\.Batch.*must be preflash's"),
    (lambda old: preflash.patch_flashinfer(["merge_stats"]), ValueError,
     r"no 'merge_stats' of.*Did you mean 'merge_state"),
    (lambda old: preflash.patch_flashinfer("merge_state"), TypeError,
     "list of names, got the string 'merge_state'"),
    (lambda old: plugin_of("vllm.general_plugins")(), ValueError,
     r"PREFLASH_PATCH='yes' in the environment: .*'yes'"),
]  # fmt: skip


def test_refusals(flashinfer, monkeypatch):
    monkeypatch.setenv("PREFLASH_PATCH", "yes")
    wrapper = getattr(flashinfer, DECODE)()
    with preflash.patch_flashinfer():
        patched = attributes()
        for call, error, says in REFUSED:
            with pytest.raises(error, match=says):
                call(wrapper)
        assert attributes() == patched


def test_an_interrupted_patch_changes_nothing(flashinfer, engine):
    before = attributes()

    def interrupt(frame, event, argument):
        if not frame.f_code.co_filename.endswith("patch.py"):
            return None
        if flashinfer.merge_state is preflash.merge_state:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            preflash.patch_flashinfer(names=["merge_state"])
    finally:
        sys.settrace(None)
    assert attributes() == before


def test_names_one_by_one(flashinfer, engine):
    with preflash.patch_flashinfer(names=["merge_state"]) as patch:
        assert {r.new for r in patch.replaced} == {preflash.merge_state}
        assert engine.merge is preflash.merge_state
        assert engine._pack(0) == "theirs"
        with preflash.patch_flashinfer(names=("merge_state", "packbits")) as more:
            assert {r.new for r in more.replaced} == {preflash.packbits}


def test_extra_attributes_are_kept_while_patched(flashinfer):
    flashinfer.merge_state.fi_trace = trace = object()
    theirs = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    theirs.run = lambda self: None
    theirs.run.fi_trace = of_run = object()
    with preflash.patch_flashinfer(), preflash.patch_flashinfer():
        assert flashinfer.merge_state is preflash.merge_state
        assert preflash.merge_state.fi_trace is trace
        assert preflash.BatchPrefillWithPagedKVCacheWrapper.run.fi_trace is of_run
    assert not hasattr(preflash.merge_state, "fi_trace")
    assert not hasattr(preflash.BatchPrefillWithPagedKVCacheWrapper.run, "fi_trace")


@pytest.mark.parametrize(
    ("cuda", "capability", "patched"),
    [
        ("13.0", 20, False),  # older than any kernel
        (None, 20, True),  # a torch without CUDA uses no GPU
    ],
)
def test_refused_where_no_kernel_serves_the_gpu(flashinfer, monkeypatch, cuda, capability, patched):
    """The GPU is torch's: of a process that uses CUDA, the current one."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    before = attributes()
    with preflash.patch_flashinfer() as patch:
        assert bool(patch.replaced) == patched
        if not patched:
            assert attributes() == before
            assert re.search(r"no kernel .*\(sm 20\): ", patch.reason)


@pytest.mark.parametrize(
    ("architectures", "capability", "serves"),
    [
        ("80;90", 100, False), ("80;90+PTX", 100, True), ("80;90a", 100, False),
        ("80", 89, True), ("80", 75, False), ("100a", 103, False),
    ],
)  # fmt: skip
def test_architectures_that_serve_a_gpu(architectures, capability, serves):
    assert preflash._core.compiled_for(architectures, capability) is serves


def plugin_of(group: str):
    """Loads the one entry point of a group, which engines call without arguments."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, path),) = groups[group].items()
    return EntryPoint(name, path, group).load()


@pytest.mark.parametrize(
    ("group", "value", "replaced"),
    [
        ("vllm.general_plugins", "", ()),
        ("vllm.general_plugins", "1", ("merge", "_pack")),
        ("sglang.srt.plugins", "0", ()),
        ("sglang.srt.plugins", "merge_state, merge_states", ("merge",)),
    ],
)
def test_the_plugins_of_the_engines(engine, monkeypatch, capsys, group, value, replaced):
    monkeypatch.setenv("PREFLASH_PATCH", value)
    plugin_of(group)()
    for name in ("merge", "_pack"):
        ours = getattr(engine, name).__module__.startswith("preflash.")
        assert ours == (name in replaced)
    assert ("patch of flashinfer 9.8.7" in capsys.readouterr().err) == bool(replaced)


NOT_PATCHED = {
    "absent": (None, "^flashinfer is not installed$"),
    "lacks a module": ("import no_such_module_of_its", "does not import.*no_such_module_of_its"),
    "raises": ("raise OSError('no driver')", "does not import.*no driver"),
    "another package": ("", "none of the names"),
    "preflash": (preflash, "is preflash"),
}


@pytest.mark.parametrize(("package", "reason"), NOT_PATCHED.values(), ids=NOT_PATCHED)
def test_nothing_is_replaced(no_flashinfer, tmp_path, package, reason):
    if isinstance(package, str):
        tmp_path.joinpath("flashinfer.py").write_text(package)
        no_flashinfer.syspath_prepend(str(tmp_path))
    else:
        no_flashinfer.setitem(sys.modules, "flashinfer", package)
    before = {*sys.modules, "flashinfer"}
    with preflash.patch_flashinfer() as patch:
        assert patch.replaced == []
        assert re.search(reason, patch.reason)
        assert "nothing replaced" in repr(patch)
    assert {*sys.modules, "flashinfer"} == before


def test_the_documented_sitecustomize_reaches_a_process(flashinfer, tmp_path):
    text = (ROOT / "docs" / "flashinfer.md").read_text()
    (block,) = re.findall(r"```python\n(# sitecustomize.py.*?)```", text, re.DOTALL)
    (tmp_path / "sitecustomize.py").write_text(block)
    code = "import serving_engine; print(serving_engine.merge.__module__)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.split() == ["preflash.cascade"]
    assert done.stderr.count("patch of flashinfer 9.8.7") == 1


@pytest.fixture(scope="module")
def real():
    return pytest.importorskip("flashinfer", exc_type=ImportError)


HOMES = "attention cascade cudnn decode page pod prefill quantization sparse"


def served():
    """Yields every name that is replaced: flashinfer's module, the name and our object."""
    for home in HOMES.split():
        theirs, ours = (
            importlib.import_module(f"{of}.{home}") for of in ("flashinfer", "preflash")
        )
        for name in ours.__all__:
            yield theirs, name, getattr(ours, name)


def test_the_real_package(real):
    before = attributes()
    with preflash.patch_flashinfer() as patch:
        assert patch.reason is None
        for module, name, ours in served():
            assert getattr(module, name, None) is getattr(real, name, ours) is ours, name
        assert real.BatchMLAPagedAttentionWrapper.__module__.startswith("flashinfer.")
    after = attributes()
    assert {key: after[key] for key in before} == before  # modules imported meanwhile are new


# Defaults of flashinfer's 0.7.2 that are not ours, and why that changes nothing.
OTHER_DEFAULTS = {
    "head_dim_qk": "head_dim is another name for it, so that neither is required",
    "use_fp16_qk_reduction": "allow_fp16_qk_reduction is another name for it",
    "trtllm_batch_context_with_kv_cache(backend)": "'trtllm-gen' there is one of several names",
}


def callables():
    """Yields each function and public method that both have: its name, theirs and ours."""
    for module, name, ours in served():
        theirs = getattr(module, name)
        if not isinstance(ours, type):
            yield name, theirs, ours
            continue
        for method in ("__init__", *(key for key in dir(theirs) if not key.startswith("_"))):
            assert hasattr(ours, method), f"{name}.{method}"
            if callable(getattr(theirs, method)):
                yield f"{name}.{method}", getattr(theirs, method), getattr(ours, method)


def test_the_real_signatures(real):
    """Ours take every parameter of theirs, with its default."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    seen = 0
    for name, theirs, ours in callables():
        own = inspect.signature(ours).parameters
        more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
        for key, parameter in inspect.signature(theirs).parameters.items():
            if parameter.kind in several:
                continue
            assert key in own or more, f"{name}({key})"
            if key in own and not {key, f"{name}({key})"} & OTHER_DEFAULTS.keys():
                assert own[key].default == parameter.default, f"{name}({key})"
            seen += 1
    assert seen > 500
