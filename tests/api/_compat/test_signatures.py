"""The public functions have the documented parameters: names, order, defaults."""

import inspect

import preflash
import pytest
from preflash._check import calls as _calls
from preflash._wrappers.batch import BatchPrefillWrapper

REQUIRED = inspect.Parameter.empty
NONE = None

WRAPPER_INIT = {
    "float_workspace_buffer": REQUIRED,
    "kv_layout": "NHD",
    "use_cuda_graph": False,
    "qo_indptr_buf": NONE,
}
MASK_BUFFERS = {"custom_mask_buf": NONE, "qk_indptr_buf": NONE, "backend": "auto"}

PAGED_INIT = {
    **WRAPPER_INIT,
    "paged_kv_indptr_buf": NONE,
    "paged_kv_indices_buf": NONE,
    "paged_kv_last_page_len_buf": NONE,
    **MASK_BUFFERS,
}
RAGGED_INIT = {**WRAPPER_INIT, "kv_indptr_buf": NONE, **MASK_BUFFERS}

MASKS = {"custom_mask": NONE, "packed_custom_mask": NONE, "causal": False}
ENCODING = {"pos_encoding_mode": "NONE", "allow_fp16_qk_reduction": False}
ROPE = {"rope_scale": NONE, "rope_theta": NONE}

PAGED_PLAN = {
    "qo_indptr": REQUIRED,
    "paged_kv_indptr": REQUIRED,
    "paged_kv_indices": REQUIRED,
    "paged_kv_last_page_len": REQUIRED,
    "num_qo_heads": REQUIRED,
    "num_kv_heads": REQUIRED,
    "head_dim": REQUIRED,
    "page_size": REQUIRED,
    **MASKS,
    **ENCODING,
    "sm_scale": NONE,
    "window_left": -1,
    "logits_soft_cap": NONE,
    **ROPE,
    "q_data_type": "float16",
    "kv_data_type": NONE,
    "non_blocking": True,
}
# Here the window and the cap precede the scale, the reverse of the paged order.
RAGGED_PLAN = {
    "qo_indptr": REQUIRED,
    "kv_indptr": REQUIRED,
    "num_qo_heads": REQUIRED,
    "num_kv_heads": REQUIRED,
    "head_dim": REQUIRED,
    **MASKS,
    **ENCODING,
    "window_left": -1,
    "logits_soft_cap": NONE,
    "sm_scale": NONE,
    **ROPE,
    "q_data_type": "float16",
    "kv_data_type": NONE,
}
PAGED_RUN = {
    "q": REQUIRED,
    "paged_kv_cache": REQUIRED,
    "k_scale": NONE,
    "v_scale": NONE,
    "return_lse": False,
}
RAGGED_RUN = {"q": REQUIRED, "k": REQUIRED, "v": REQUIRED, "return_lse": False}
SINGLE = {
    "q": REQUIRED,
    "k": REQUIRED,
    "v": REQUIRED,
    **MASKS,
    "kv_layout": "NHD",
    **ENCODING,
    "sm_scale": NONE,
    "window_left": -1,
    "logits_soft_cap": NONE,
    **ROPE,
}
RESET = {"float_workspace_buffer": REQUIRED, "int_workspace_buffer": REQUIRED}

PAGED = preflash.BatchPrefillWithPagedKVCacheWrapper
RAGGED = preflash.BatchPrefillWithRaggedKVCacheWrapper
SIGNATURES = {
    "paged.__init__": (PAGED.__init__, PAGED_INIT),
    "paged.plan": (PAGED.plan, PAGED_PLAN),
    "paged.begin_forward": (PAGED.begin_forward, PAGED_PLAN),
    "paged.run": (PAGED.run, PAGED_RUN),
    "paged.reset_workspace_buffer": (PAGED.reset_workspace_buffer, RESET),
    "ragged.__init__": (RAGGED.__init__, RAGGED_INIT),
    "ragged.plan": (RAGGED.plan, RAGGED_PLAN),
    "ragged.begin_forward": (RAGGED.begin_forward, RAGGED_PLAN),
    "ragged.run": (RAGGED.run, RAGGED_RUN),
    "ragged.reset_workspace_buffer": (RAGGED.reset_workspace_buffer, RESET),
    "single_prefill_with_kv_cache": (preflash.single_prefill_with_kv_cache, SINGLE),
    "single_prefill_with_kv_cache_return_lse": (
        preflash.single_prefill_with_kv_cache_return_lse,
        SINGLE,
    ),
    "packbits": (preflash.packbits, {"x": REQUIRED, "bitorder": "big"}),
    "segment_packbits": (
        preflash.segment_packbits,
        {"x": REQUIRED, "indptr": REQUIRED, "bitorder": "big"},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_documented_parameters_come_first(name):
    function, documented = SIGNATURES[name]
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    leading = parameters[: len(documented)]
    assert [p.name for p in leading] == list(documented)
    assert [p.default for p in leading] == list(documented.values())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in leading)
    # Whatever is offered beyond the documented list cannot shift a positional call.
    assert all(
        p.kind is p.KEYWORD_ONLY or p.kind is p.VAR_POSITIONAL for p in parameters[len(leading) :]
    )


@pytest.mark.parametrize(
    ("function", "default"),
    [
        (preflash.single_prefill_with_kv_cache, False),
        (preflash.single_prefill_with_kv_cache_return_lse, True),
    ],
)
def test_single_return_lse_is_keyword_only(function, default):
    parameter = inspect.signature(function).parameters["return_lse"]
    assert parameter.kind is parameter.KEYWORD_ONLY
    assert parameter.default is default


PLAN_ALIASES = [
    "head_dim_qk",
    "head_dim_vo",
    "use_fp16_qk_reduction",
    "o_data_type",
    "fixed_split_size",
    "disable_split_kv",
    "seq_lens",
    "seq_lens_q",
    "max_token_per_sequence",
    "max_sequence_kv",
    "uniform_q_len",
]
RUN_ALIASES = [
    "out",
    "lse",
    "lse_base",
    "lse_layout",
    "q_scale",
    "enable_pdl",
    "window_left",
    "sinks",
]


@pytest.mark.parametrize("wrapper", [PAGED, RAGGED])
@pytest.mark.parametrize("name", PLAN_ALIASES)
def test_newer_plan_spellings_are_keywords(wrapper, name):
    parameter = inspect.signature(wrapper.plan).parameters[name]
    assert parameter.kind is parameter.KEYWORD_ONLY


@pytest.mark.parametrize("wrapper", [PAGED, RAGGED])
@pytest.mark.parametrize("name", RUN_ALIASES)
def test_newer_run_spellings_are_keywords(wrapper, name):
    parameter = inspect.signature(wrapper.run).parameters[name]
    assert parameter.kind is parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_ragged_run_takes_scales(name):
    parameter = inspect.signature(RAGGED.run).parameters[name]
    assert parameter.kind is parameter.KEYWORD_ONLY


@pytest.mark.parametrize("wrapper", [PAGED, RAGGED])
def test_mask_indptr_buf_is_an_init_keyword(wrapper):
    assert "mask_indptr_buf" in inspect.signature(wrapper.__init__).parameters


@pytest.mark.parametrize("wrapper", [PAGED, RAGGED])
def test_workspace_size_takes_what_plan_takes(wrapper):
    plan = set(inspect.signature(wrapper.plan).parameters) - {"self", "non_blocking"}
    sizes = set(inspect.signature(wrapper.workspace_size).parameters) - {"self", "non_blocking"}
    assert plan == sizes


@pytest.mark.parametrize("wrapper", [PAGED, RAGGED])
def test_wrapper_has_every_method(wrapper):
    for name in (
        "plan",
        "begin_forward",
        "run",
        "run_return_lse",
        "forward",
        "forward_return_lse",
        "end_forward",
        "workspace_size",
        "reset_workspace_buffer",
    ):
        assert callable(getattr(wrapper, name)), name


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "prefill",
            [
                "single_prefill_with_kv_cache",
                "single_prefill_with_kv_cache_return_lse",
                "BatchPrefillWithPagedKVCacheWrapper",
                "BatchPrefillWithRaggedKVCacheWrapper",
            ],
        ),
        ("quantization", ["packbits", "segment_packbits"]),
        (
            "cascade",
            [
                "merge_state",
                "merge_state_in_place",
                "merge_states",
                "MultiLevelCascadeAttentionWrapper",
            ],
        ),
        (
            "decode",
            [
                "BatchDecodeWithPagedKVCacheWrapper",
                "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
                "single_decode_with_kv_cache",
                "fast_decode_plan",
            ],
        ),
        ("attention", ["BatchAttentionWithAttentionSinkWrapper"]),
        ("page", ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]),
    ],
)
def test_names_live_in_their_module_and_on_top(module, names):
    import importlib

    loaded = importlib.import_module(f"preflash.{module}")
    for name in names:
        assert getattr(loaded, name) is getattr(preflash, name), name


def test_version():
    assert isinstance(preflash.__version__, str)
    assert preflash.__version__[0].isdigit()


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_public_function_is_documented(name):
    function, _ = SIGNATURES[name]
    if name.endswith("__init__"):
        function = PAGED if name.startswith("paged") else RAGGED
    assert function.__doc__
    assert len(function.__doc__) > 60


@pytest.mark.parametrize(
    ("wrapper", "arguments"),
    [
        (preflash.BatchPrefillWithPagedKVCacheWrapper, _calls.PagedPlanArguments),
        (preflash.BatchPrefillWithRaggedKVCacheWrapper, _calls.RaggedPlanArguments),
        (preflash.BatchDecodeWithPagedKVCacheWrapper, _calls.DecodePlanArguments),
    ],
)
def test_every_argument_of_plan_is_handed_on(wrapper, arguments, monkeypatch):
    names = list(inspect.signature(wrapper.plan).parameters)
    assert names[0] == "self"
    received = []
    monkeypatch.setattr(wrapper, "_as_prefill", lambda self, a: (a,), raising=False)
    monkeypatch.setattr(BatchPrefillWrapper, "_make_plan", lambda self, a: received.append(a))
    monkeypatch.setattr(BatchPrefillWrapper, "_remember", lambda self, a, call, given: None)
    wrapper.plan(object.__new__(wrapper), **{name: f"that of {name}" for name in names[1:]})
    (got,) = received
    assert type(got) is arguments
    assert {name: getattr(got, name) for name in got.__slots__} == {
        name: f"that of {name}" for name in names[1:]
    }
