"""preflash.patch_flashinfer() on a synthetic flashinfer, and on the real one where it is."""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import preflash
import pytest
import torch
from preflash.testing import Case, build, compare, oracle, reference
from preflash.testing.oracle import Pipeline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = {
    "flashinfer/__init__.py": """
        __version__ = "9.8.7"
        from . import attention, pod, sparse
        from .cascade import merge_state
        from .decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
        from .decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        from .prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
        from .quantization import packbits
    """,
    "flashinfer/prefill.py": """
        import functools

        class BatchPrefillWithPagedKVCacheWrapper:
            pass

        def single_prefill_with_kv_cache(*args, return_lse=False):
            return "flashinfer's"

        single_prefill_with_kv_cache_return_lse = functools.partial(
            single_prefill_with_kv_cache, return_lse=True
        )

        def trtllm_batch_context_with_kv_cache():
            return "flashinfer's"

        def trtllm_ragged_attention_deepseek():
            return "flashinfer's"

        def fmha_varlen():
            return "flashinfer's"
    """,
    "flashinfer/decode.py": """
        from .prefill import BatchPrefillWithPagedKVCacheWrapper

        class BatchDecodeWithPagedKVCacheWrapper:
            pass

        class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
            pass

        def fast_decode_plan(self):
            return "flashinfer's"

        def cudnn_batch_decode_with_kv_cache():
            return "flashinfer's"
    """,
    "flashinfer/cascade.py": """
        from .decode import BatchDecodeWithPagedKVCacheWrapper
        from .prefill import single_prefill_with_kv_cache

        def merge_state(v_a, s_a, v_b, s_b):
            return "flashinfer's"

        def merge_state_in_place(v, s, v_other, s_other):
            return "flashinfer's"

        merge_states = None

        class DecodeBesideAPrefix:
            def __init__(self, float_workspace_buffer, kv_layout="NHD"):
                self._batch_decode_wrapper = BatchDecodeWithPagedKVCacheWrapper(
                    float_workspace_buffer, kv_layout
                )
                self._kv_layout = kv_layout

            def begin_forward(
                self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                page_size, data_type="float16",
            ):
                self._batch_decode_wrapper.begin_forward(
                    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                    page_size, pos_encoding_mode="NONE", data_type=data_type,
                )

            def forward(self, q, k_shared, v_shared, unique_kv_cache):
                own = self._batch_decode_wrapper
                v, s = single_prefill_with_kv_cache(
                    q, k_shared, v_shared, causal=False, pos_encoding_mode="NONE",
                    kv_layout=self._kv_layout, sm_scale=own._sm_scale,
                    rope_scale=own._rope_scale, rope_theta=own._rope_theta, return_lse=True,
                )
                more = own.forward_return_lse(q, unique_kv_cache, pos_encoding_mode="NONE")
                merge_state_in_place(v, s, *more)
                return v
    """,
    "flashinfer/attention/__init__.py": """
        from ._core import BatchAttention
    """,
    "flashinfer/attention/_core.py": """
        class BatchAttention:
            pass
    """,
    "flashinfer/sparse.py": """
        class BlockSparseAttentionWrapper:
            pass

        class VariableBlockSparseAttentionWrapper:
            pass
    """,
    "flashinfer/pod.py": """
        from .quantization import packbits

        class PODWithPagedKVCacheWrapper:
            pass
    """,
    # As in the real one, a submodule has a function's name.
    "flashinfer/quantization/__init__.py": """
        from .packbits import packbits
        from . import segment_packbits
    """,
    "flashinfer/quantization/packbits.py": """
        def packbits(x, bitorder="big"):
            return "flashinfer's"
    """,
    "flashinfer/quantization/segment_packbits.py": "",
    "flashinfer/late.py": """
        from .decode import BatchDecodeWithPagedKVCacheWrapper
    """,
    "serving_engine.py": """
        import flashinfer
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
        from flashinfer.decode import cudnn_batch_decode_with_kv_cache
        from flashinfer.cascade import merge_state as merge
        from flashinfer.quantization import packbits as _pack
    """,
    "late_engine.py": """
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    """,
}
PACKAGE_NAMES = ("flashinfer", "serving_engine", "late_engine")


def _forget():
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGE_NAMES:
            del sys.modules[name]


@pytest.fixture
def no_flashinfer(monkeypatch):
    """Modules of a flashinfer that a test imports are forgotten; a real one comes back."""
    with monkeypatch.context() as context:
        for name in list(sys.modules):
            if name.partition(".")[0] in PACKAGE_NAMES:
                context.delitem(sys.modules, name)
        yield context
        _forget()


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
    """Identity of every attribute of the imported modules of PACKAGE_NAMES."""
    return {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        for key, value in list(getattr(module, "__dict__", {}).items())
        if name.partition(".")[0] in PACKAGE_NAMES and key != "__builtins__"
    }


def test_every_module_that_holds_a_name_gets_ours(flashinfer, engine):
    with preflash.patch_flashinfer() as patch:
        changed = {(r.module.__name__, r.name) for r in patch.replaced}
        assert flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper is (
            preflash.BatchDecodeWithPagedKVCacheWrapper
        )
        assert flashinfer.merge_state is flashinfer.cascade.merge_state is preflash.merge_state
        assert engine.merge is preflash.merge_state
        assert engine._pack is flashinfer.pod.packbits is preflash.packbits
        assert flashinfer.prefill.single_prefill_with_kv_cache_return_lse is (
            preflash.single_prefill_with_kv_cache_return_lse
        )
        assert patch.reason is None
    assert changed == {
        ("flashinfer", "BatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper"),
        ("flashinfer", "fast_decode_plan"),
        ("flashinfer", "merge_state"),
        ("flashinfer", "packbits"),
        ("flashinfer", "single_prefill_with_kv_cache"),
        ("flashinfer.attention", "BatchAttention"),
        ("flashinfer.attention._core", "BatchAttention"),
        ("flashinfer.cascade", "BatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer.cascade", "merge_state"),
        ("flashinfer.cascade", "merge_state_in_place"),
        ("flashinfer.cascade", "single_prefill_with_kv_cache"),
        ("flashinfer.decode", "BatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer.decode", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer.decode", "BatchPrefillWithPagedKVCacheWrapper"),
        ("flashinfer.decode", "cudnn_batch_decode_with_kv_cache"),
        ("flashinfer.decode", "fast_decode_plan"),
        ("flashinfer.pod", "PODWithPagedKVCacheWrapper"),
        ("flashinfer.pod", "packbits"),
        ("flashinfer.prefill", "BatchPrefillWithPagedKVCacheWrapper"),
        ("flashinfer.prefill", "fmha_varlen"),
        ("flashinfer.prefill", "single_prefill_with_kv_cache"),
        ("flashinfer.prefill", "single_prefill_with_kv_cache_return_lse"),
        ("flashinfer.prefill", "trtllm_batch_context_with_kv_cache"),
        ("flashinfer.quantization", "packbits"),
        ("flashinfer.quantization.packbits", "packbits"),
        ("serving_engine", "BatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer.sparse", "BlockSparseAttentionWrapper"),
        ("flashinfer.sparse", "VariableBlockSparseAttentionWrapper"),
        ("serving_engine", "cudnn_batch_decode_with_kv_cache"),
        ("serving_engine", "fast_decode_plan"),
        ("serving_engine", "merge"),
        ("serving_engine", "_pack"),
    }


def test_what_is_not_served_stays(flashinfer, engine):
    before = attributes()
    with preflash.patch_flashinfer() as patch:
        changed = {(r.module.__name__, r.name) for r in patch.replaced}
        after = attributes()
    assert after.keys() == before.keys()
    assert {key for key in before if before[key] != after[key]} == changed
    untouched = {name for _, name in before} - {name for _, name in changed}
    assert {
        "trtllm_ragged_attention_deepseek",
        "segment_packbits",
        "merge_states",
    } <= untouched


class SharedPrefix:
    """Requests of one query whose keys are those of a prefix and pages of their own."""

    def __init__(self, layout, queries=(1, 1, 1)):
        self.layout, self.kv_lens = layout, (30, 5, 16)
        case = Case("own", queries, self.kv_lens, 4, 2, 64, page_size=16)
        self.inputs = build(dataclasses.replace(case, dtype=torch.float16, layout=layout))
        generator = torch.Generator().manual_seed(1)
        shape = (40, 2, 64) if layout == "NHD" else (2, 40, 64)
        self.k, self.v = (torch.randn(shape, generator=generator).half() for _ in range(2))

    def table(self):
        return (self.inputs.kv_indptr, self.inputs.indices, self.inputs.last_page_len)

    def check(self, out):
        inputs, rows = self.inputs, []
        keys, values = (oracle_rows(t, self.layout) for t in (self.k, self.v))
        pools = inputs.cache if isinstance(inputs.cache, tuple) else inputs.cache.unbind(1)
        for request, count in enumerate(inputs.case.qo_lens):
            own = [
                oracle_rows(pool[inputs.page_table[request]], self.layout).flatten(0, 1)[
                    : self.kv_lens[request]
                ]
                for pool in pools
            ]
            begin = int(inputs.qo_indptr[request])
            q = inputs.q[begin : begin + count]
            whole = (torch.cat([keys, own[0]]), torch.cat([values, own[1]]))
            rows.append(oracle.attend(q, *whole, Pipeline(64**-0.5)))
        expected = oracle.concatenate(rows)
        expected.spread = expected.spread + 2 * expected.out.abs()  # roundings of the two states
        compare(out, None, expected).check()


def oracle_rows(tensor, layout):
    return tensor if layout == "NHD" else tensor.transpose(-3, -2)


def decode_beside_a_shared_prefix(
    module, layout, name="BatchDecodeWithSharedPrefixPagedKVCacheWrapper"
):
    shared = SharedPrefix(layout)
    wrapper = getattr(module, name)(torch.empty(1 << 20, dtype=torch.uint8), layout)
    own = wrapper._batch_decode_wrapper
    assert isinstance(own, preflash.BatchDecodeWithPagedKVCacheWrapper)
    assert own._rope_scale is own._rope_theta is own._pos_encoding_mode is None
    for _ in range(2):
        wrapper.begin_forward(*shared.table(), 4, 2, 64, 16, "float16")
        for _ in range(2):
            shared.check(wrapper.forward(shared.inputs.q, shared.k, shared.v, shared.inputs.cache))
    assert own._pos_encoding_mode == "NONE"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_class_of_flashinfer_that_builds_on_our_decode_wrapper(flashinfer, layout):
    with preflash.patch_flashinfer():
        module = importlib.import_module("flashinfer.cascade")
        decode_beside_a_shared_prefix(module, layout, "DecodeBesideAPrefix")


def test_a_patched_engine_computes_attention(flashinfer):
    case = Case("single", (9,), (30,), 4, 2, 64)
    inputs = build(case)
    with preflash.patch_flashinfer():
        single = importlib.import_module("flashinfer.prefill").single_prefill_with_kv_cache
        out, lse = single(inputs.q, inputs.k[:30], inputs.v[:30], return_lse=True)
    compare(out, lse, reference(inputs)).check()
    assert flashinfer.single_prefill_with_kv_cache() == "flashinfer's"


def test_undo_restores_every_object(flashinfer, engine):
    before = attributes()
    patch = preflash.patch_flashinfer()
    assert attributes() != before
    patch.undo()
    assert attributes() == before
    patch.undo()
    assert attributes() == before


def test_an_exception_leaves_the_block_undone(flashinfer, engine):
    before = attributes()
    with pytest.raises(KeyError), preflash.patch_flashinfer():
        raise KeyError
    assert attributes() == before


def test_what_others_set_since_is_left_alone(flashinfer):
    patch = preflash.patch_flashinfer()
    flashinfer.merge_state = mine = object()
    patch.undo()
    assert flashinfer.merge_state is mine
    assert flashinfer.cascade.merge_state.__module__ == "flashinfer.cascade"


def test_a_second_patch_changes_nothing_and_undoes_nothing(flashinfer, engine):
    before = attributes()
    with preflash.patch_flashinfer() as first:
        patched = attributes()
        with preflash.patch_flashinfer() as second:
            assert attributes() == patched
        assert attributes() == patched
        assert second.replaced == []
        assert "already" in second.reason
        assert "already" in repr(second)
        assert first.replaced
    assert attributes() == before
    with preflash.patch_flashinfer() as again:
        assert attributes() == patched
        assert len(again.replaced) == len(first.replaced)


def test_modules_imported_while_patched(flashinfer):
    original = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    with preflash.patch_flashinfer():
        late = importlib.import_module("flashinfer.late")
        engine = importlib.import_module("late_engine")
        for module in (late, engine):
            assert module.BatchDecodeWithPagedKVCacheWrapper is (
                preflash.BatchDecodeWithPagedKVCacheWrapper
            )
    assert late.BatchDecodeWithPagedKVCacheWrapper is original
    # Documented: it cannot be told from an import of preflash's own.
    assert engine.BatchDecodeWithPagedKVCacheWrapper is preflash.BatchDecodeWithPagedKVCacheWrapper


def test_repr_says_what_came_from_where(flashinfer, engine):
    patch = preflash.patch_flashinfer()
    text = repr(patch)
    assert "flashinfer 9.8.7" in text
    assert "in effect" in text
    assert "preflash.decode.fast_decode_plan in flashinfer" in text
    assert "serving_engine (as merge)" in text
    assert all(r.module.__name__ in text for r in patch.replaced)
    patch.undo()
    assert "undone" in repr(patch)


def test_modules_that_load_themselves_are_not_loaded(flashinfer, no_flashinfer, tmp_path):
    tmp_path.joinpath("serving_engine.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.find_spec("serving_engine")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    no_flashinfer.setitem(sys.modules, "serving_engine", module)
    spec.loader.exec_module(module)
    with preflash.patch_flashinfer() as patch:
        assert patch.replaced


def test_wrappers_made_before_are_refused(flashinfer):
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper()
    array = torch.tensor([0], dtype=torch.int32)
    with preflash.patch_flashinfer():
        plan = partial(flashinfer.fast_decode_plan, wrapper)
        with pytest.raises(TypeError, match=r"flashinfer\.decode\.CUDAGraph.*must be preflash's"):
            plan(array, array, array, 4, 2, 64, 16)


def test_an_interrupted_patch_changes_nothing(flashinfer, engine, monkeypatch):
    before = attributes()
    replace = preflash._compat.patch._replace

    def interrupted(replacements):
        replace(replacements[: len(replacements) // 2])
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(preflash._compat.patch, "_replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preflash.patch_flashinfer()
    assert attributes() == before


def test_names_one_by_one(flashinfer, engine):
    with preflash.patch_flashinfer(names=["merge_state"]) as patch:
        assert {r.new for r in patch.replaced} == {preflash.merge_state}
        assert engine.merge is preflash.merge_state
        assert engine._pack(0) == "flashinfer's"
        with preflash.patch_flashinfer(names=("merge_state", "packbits")) as more:
            assert {r.new for r in more.replaced} == {preflash.packbits}
    with pytest.raises(ValueError, match=r"no 'merge_stats' of.*Did you mean 'merge_state"):
        preflash.patch_flashinfer(names=["merge_stats"])
    with pytest.raises(TypeError, match="list of names, got the string 'merge_state'"):
        preflash.patch_flashinfer(names="merge_state")


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
    ("architectures", "capability", "why"),
    [
        ("", 90, r"this build of preflash has no kernel for a GPU \(sm 90\): "),
        ("80;90", 100, r"no kernel .* serves a GPU here \(sm 100\): it has .*fa2 for sm 80;90$"),
        ("80;90+PTX", 100, None),
        ("80;90a", 100, "no kernel"),
        ("80", 89, None),
        ("80", 75, "no kernel"),
    ],
)
def test_refused_where_no_kernel_serves_the_gpu(
    flashinfer, monkeypatch, architectures, capability, why
):
    gpus = preflash._device.gpus
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpus, "capabilities", lambda: [capability])
    monkeypatch.setattr(gpus._core, "architectures", lambda family: architectures)
    before = attributes()
    with preflash.patch_flashinfer() as patch:
        if why is None:
            assert patch.replaced
        else:
            assert attributes() == before
            assert re.search(why, patch.reason)
            assert "nothing replaced" in repr(patch)


def test_a_torch_without_cuda_uses_no_gpu(flashinfer, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(preflash._device.gpus, "capabilities", lambda: [100])
    with preflash.patch_flashinfer() as patch:
        assert patch.replaced


@pytest.mark.parametrize(
    ("group", "value", "merge", "pack"),
    [
        ("vllm.general_plugins", None, "serving_engine's", "serving_engine's"),
        ("vllm.general_plugins", "1", "preflash.cascade", "preflash.quantization"),
        ("sglang.srt.plugins", "0", "serving_engine's", "serving_engine's"),
        (
            "sglang.srt.plugins",
            "merge_state, merge_states",
            "preflash.cascade",
            "serving_engine's",
        ),
    ],
)
def test_the_plugins_of_the_engines(flashinfer, tmp_path, group, value, merge, pack):
    """Found and called as both engines do: importlib.metadata, load(), a call without arguments."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    entries = tomllib.loads(project)["project"]["entry-points"]
    info = tmp_path / "preflash_of_this_test-1.dist-info"
    info.mkdir()
    lines = [
        f"[{name}]\n{key} = {target}\n"
        for name, entry in entries.items()
        for key, target in entry.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    (info / "METADATA").write_text("Name: preflash-of-this-test\nVersion: 1\n")
    code = f"""
        from importlib.metadata import entry_points
        for entry in entry_points(group={group!r}):
            if entry.value.startswith("preflash."):
                entry.load()()
        import serving_engine as e
        for f in (e.merge, e._pack):
            print(f.__module__ if f.__module__.startswith("preflash.") else "serving_engine's")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment.pop("PREFLASH_PATCH", None)
    if value is not None:
        environment["PREFLASH_PATCH"] = value
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [merge, pack]
    assert ("patch of flashinfer 9.8.7" in done.stderr) == (value not in (None, "0"))


def test_a_wrong_name_in_the_environment_is_said(flashinfer, monkeypatch):
    monkeypatch.setenv("PREFLASH_PATCH", "yes")
    with pytest.raises(ValueError, match=r"PREFLASH_PATCH='yes' in the environment: .*'yes'"):
        preflash._compat.patch.patch_engine()


def test_absent(no_flashinfer):
    no_flashinfer.setitem(sys.modules, "flashinfer", None)
    with preflash.patch_flashinfer() as patch:
        assert patch.replaced == []
        assert patch.reason == "flashinfer is not installed"
        assert "nothing replaced" in repr(patch)


@pytest.mark.parametrize(
    "statement", ["import no_such_module_of_its", "raise OSError('no driver')"]
)
def test_does_not_import(no_flashinfer, tmp_path, statement):
    tmp_path.joinpath("flashinfer.py").write_text(statement)
    no_flashinfer.syspath_prepend(str(tmp_path))
    with preflash.patch_flashinfer() as patch:
        assert patch.replaced == []
        assert "does not import" in patch.reason
        assert "no_such_module_of_its" in patch.reason or "no driver" in patch.reason


def test_another_package_of_that_name(no_flashinfer, tmp_path):
    tmp_path.joinpath("flashinfer.py").write_text("")
    no_flashinfer.syspath_prepend(str(tmp_path))
    assert "none of the names" in preflash.patch_flashinfer().reason


def test_preflash_under_that_name(no_flashinfer):
    no_flashinfer.setitem(sys.modules, "flashinfer", preflash)
    before = set(sys.modules)
    assert "is preflash" in preflash.patch_flashinfer().reason
    assert set(sys.modules) == before


def test_the_documented_sitecustomize_reaches_every_process(flashinfer, tmp_path):
    """The code block of docs/flashinfer.md, in a process and in one that it starts."""
    document = Path(__file__).parents[3] / "docs" / "flashinfer.md"
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if block.startswith("# sitecustomize.py"))
    (tmp_path / "sitecustomize.py").write_text(block)
    show = "import serving_engine; print(serving_engine.merge.__module__, flush=True)"
    code = f"import subprocess, sys; {show}; subprocess.run([sys.executable, '-c', {show!r}])"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["preflash.cascade", "preflash.cascade"]
    assert done.stderr.count("patch of flashinfer 9.8.7") == 2


def test_the_documented_block_runs(flashinfer, capsys):
    document = Path(__file__).parents[3] / "docs" / "flashinfer.md"
    block = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)[0]
    before = attributes()
    exec(compile(block, document.name, "exec"), {})
    assert "preflash.decode.fast_decode_plan" in capsys.readouterr().out
    assert attributes() == before


@pytest.fixture(scope="module")
def real():
    return pytest.importorskip("flashinfer", exc_type=ImportError)


def served():
    """Every name that is replaced: its module's name and our object."""
    for module_name in preflash._compat.patch._MODULES:
        module = getattr(preflash, module_name)
        for name in module.__all__:
            yield module_name, name, getattr(module, name)


def test_the_real_package(real):
    """Every name that preflash replaces is ours while patched, in its home module and on top."""
    before = attributes()
    with preflash.patch_flashinfer() as patch:
        assert patch.reason is None
        missing = []
        for module, name, ours in served():
            if getattr(importlib.import_module(f"flashinfer.{module}"), name, None) is not ours:
                missing.append(name)
            else:
                assert getattr(real, name, ours) is ours
        assert missing == []
        for kept in ("BatchMLAPagedAttentionWrapper",):
            assert getattr(real, kept).__module__.startswith("flashinfer.")
    # Modules that were imported meanwhile are new.
    after = attributes()
    assert {key: after[key] for key in before} == before


# Where a default of flashinfer's 0.7.2 is not ours, and why that changes nothing.
OTHER_DEFAULTS = {
    "head_dim_qk": "head_dim is another name for it, so that neither is required",
    "use_fp16_qk_reduction": "allow_fp16_qk_reduction is another name for it",
    "trtllm_batch_context_with_kv_cache(backend)": "'trtllm-gen' there is one of several names",
}


def callables():
    """Each function and public method that both have: its name, theirs and ours."""
    for module, name, ours in served():
        theirs = getattr(importlib.import_module(f"flashinfer.{module}"), name, None)
        if theirs is None:
            continue
        if not isinstance(ours, type):
            yield name, theirs, ours
            continue
        for method in ("__init__", *(key for key in dir(theirs) if not key.startswith("_"))):
            assert hasattr(ours, method), f"{name}.{method}"
            if callable(getattr(theirs, method)):
                yield f"{name}.{method}", getattr(theirs, method), getattr(ours, method)


def test_the_real_signatures(real):
    """Ours take every parameter of theirs, with its default."""
    kinds = inspect.Parameter
    seen = 0
    for name, theirs, ours in callables():
        own = inspect.signature(ours).parameters
        more = any(p.kind is kinds.VAR_KEYWORD for p in own.values())
        for key, parameter in inspect.signature(theirs).parameters.items():
            if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
                continue
            assert key in own or more, f"{name}({key})"
            if key in own and not {key, f"{name}({key})"} & OTHER_DEFAULTS.keys():
                assert own[key].default == parameter.default, f"{name}({key})"
            seen += 1
    assert seen > 500


def test_the_real_package_computes_with_our_kernels(real):
    """A caller of flashinfer's on CPU tensors, which flashinfer itself does not take."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as Theirs

    case = Case("paged", (9, 3), (30, 5), 4, 2, 64, page_size=16)
    inputs = build(case)
    with preflash.patch_flashinfer():
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as Ours

        wrapper = Ours(torch.empty(1 << 20, dtype=torch.uint8), "NHD")
        wrapper.plan(
            inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len,
            4, 2, 64, 16, sm_scale=case.scale, q_data_type=case.dtype,
        )  # fmt: skip
        out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True)
    compare(out[:12], lse[:12], reference(inputs)).check()
    assert Theirs is real.prefill.BatchPrefillWithPagedKVCacheWrapper is not Ours


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_real_decode_beside_a_shared_prefix(real, layout):
    with preflash.patch_flashinfer():
        decode_beside_a_shared_prefix(importlib.import_module("flashinfer.cascade"), layout)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_real_prefill_beside_a_shared_prefix(real, layout):
    shared = SharedPrefix(layout, queries=(3, 1, 7))
    with preflash.patch_flashinfer():
        module = importlib.import_module("flashinfer.cascade")
        wrapper = module.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
            torch.empty(1 << 20, dtype=torch.uint8), layout
        )
        inputs = shared.inputs
        wrapper.begin_forward(inputs.qo_indptr, *shared.table(), 4, 2, 64, 16)
        for _ in range(2):
            shared.check(wrapper.forward(inputs.q, shared.k, shared.v, inputs.cache))
