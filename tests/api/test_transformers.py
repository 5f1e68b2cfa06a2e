"""Models of transformers with small random weights have the logits and tokens of eager."""

import copy
import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from engine_modules import recorded_plans  # noqa: F401

transformers = pytest.importorskip("transformers", minversion="5.20")

from preflash.integrations import transformers as integration  # noqa: E402
from torch.nn.functional import pad  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}
SLIDING = ["sliding_attention", "full_attention"] * 2
WINDOW = {**GROUPED, "sliding_window": 9}
BOTH = {**WINDOW, "layer_types": SLIDING}

# Sequences are up to 29 tokens and 8 more: the windows end inside.
CONFIGS = {
    "Llama": GROUPED,
    "Mistral": WINDOW,
    "Qwen3": GROUPED,
    "Gemma2": {**BOTH, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "Gemma3Text": {**BOTH, "sliding_window": 8, "query_pre_attn_scalar": 20},
    "Gemma4Text": {
        **BOTH, "global_head_dim": 512, "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 16,
    },
    "GptOss": {**BOTH, "num_local_experts": 2, "num_experts_per_tok": 2},
    # Its attention is called without the window, which the mask alone has.
    "Qwen2Moe": {
        **WINDOW, "use_sliding_window": True, "max_window_layers": 2, "num_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
OTHERS = {
    "Bert": SMALL,
    "Bart": {
        "vocab_size": 61, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.2,
    },
}  # fmt: skip
NAMES = ("eager", "preflash")
causal = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.fixture
def dtype(target):
    """float32 where a backend has it: greedy tokens of two roundings need no luck then."""
    integration.register(target.backend)
    return torch.float32 if target.device == "cpu" else torch.bfloat16


def config_of(name: str):
    cls = getattr(transformers, f"{name}Config", None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return cls(**OTHERS.get(name) or CONFIGS[name])


@functools.cache
def model_of(name: str, attention: str, device: str, dtype: torch.dtype):
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if name in CONFIGS else AutoModel
    model = auto.from_config(config_of(name), attn_implementation=attention, dtype=torch.float32)
    for key, value in model.named_parameters():
        if key.endswith("sinks"):
            value.normal_()
    assert model.config._attn_implementation == attention
    return model.eval().to(device, dtype)


def pair(name, target, dtype):
    return tuple(model_of(name, attention, target.device, dtype) for attention in NAMES)


def tokens(target, *lengths, seed=1):
    """Draws right-aligned ids [batch, longest] and their mask."""
    torch.manual_seed(seed)
    ids = torch.randint(2, 61, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return target.to(ids * mask), target.to(mask.long())


def assert_close(got, expected, dtype, exact=None):
    """Compares with eager; in bfloat16, how far each is from the exact result in float32."""
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
        return
    rounding = (expected.float() - exact.float()).abs().mean()
    assert (got.float() - exact.float()).abs().mean() <= 1.25 * rounding + 1e-3


def assert_greedy(name, target, dtype, prompt, mask, got, expected):
    """Requires equal tokens in float32; in bfloat16, each the best but for rounding of logits."""
    if dtype == torch.float32:
        assert torch.equal(got, expected)
        return
    ids, n = torch.cat([prompt, got], 1), prompt.shape[1]
    options = {"input_ids": ids, "attention_mask": torch.cat([mask, torch.ones_like(got)], 1)}
    exact, rounded = (
        model_of(name, "eager", target.device, kind)(**options).logits[:, n - 1 : -1].float()
        for kind in (torch.float32, dtype)
    )
    missed = exact.max(-1).values - exact.gather(-1, got[..., None])[..., 0]
    assert missed.max() <= 2 * (rounded - exact).abs().max()


def compare(name, target, dtype, call, rows=slice(None)):
    """Compares call() of both models; eager in float32 gives the exact result for other dtypes."""
    eager, model = (call(m)[rows] for m in pair(name, target, dtype))
    exact = None
    if dtype != torch.float32:
        exact = call(model_of(name, "eager", target.device, torch.float32))[rows]
    assert_close(model, eager, dtype, exact)
    return model


@causal
@pytest.mark.parametrize("known_by", ["position_ids", "cu_seq_lens"])
def test_packed_batches(name, target, dtype, known_by):
    lengths = (12, 1, 16)
    ids, _ = tokens(target, sum(lengths))
    positions = target.to(torch.cat([torch.arange(n) for n in lengths])[None])
    ends = target.to(torch.tensor([0, *lengths]).cumsum(0).int())
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 16, "max_length_k": 16}

    def logits(model):
        attention = model.config._attn_implementation
        if known_by == "position_ids":
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits
        if attention == "eager":
            return torch.cat([model(input_ids=part).logits for part in ids.split(lengths, 1)], 1)
        return model(input_ids=ids, position_ids=positions, use_cache=False, **options).logits

    compare(name, target, dtype, logits)


@causal
@pytest.mark.parametrize("seed", range(8))
def test_random_calls(name, seed, target, dtype):
    """Prompts that come in parts, with any padding, on either cache or none; masks of a static
    cache may be as long as its slots."""
    draw = random.Random(f"{name} {seed}")
    batch, length = draw.randint(1, 3), draw.randint(2, 40)
    ids, mask = tokens(target, *[length] * batch, seed=seed)
    padding = draw.choice(["", "left", "right", "left right", "anywhere"])
    for row in mask:
        first = draw.randrange(length)
        end = draw.randint(first + 1, length)
        row[: first if "left" in padding else 0] = 0
        row[end if "right" in padding else length :] = 0
        if padding == "anywhere":
            row[1:] = target.to(torch.rand(length - 1) < 0.7)
    cache = draw.choice(("dynamic", "static", "none"))
    cuts = 0 if cache == "none" else min(length - 1, draw.randint(0, 3))
    ends = [*sorted(draw.sample(range(1, length), cuts)), length]
    slots = length + draw.choice([0, 9])
    is_long = cache == "static" and draw.random() < 0.5

    def logits(model):
        options = {"use_cache": False}
        if cache == "dynamic":
            options = {"past_key_values": transformers.DynamicCache(config=model.config)}
        if cache == "static":
            memory = transformers.StaticCache(config=model.config, max_cache_len=slots)
            options = {"past_key_values": memory}
        parts = []
        for begin, end in itertools.pairwise([0, *ends]):
            seen = mask[:, :end] if padding else None
            if padding and is_long:
                seen = pad(seen, (0, slots - end))
            parts.append(model(input_ids=ids[:, begin:end], attention_mask=seen, **options).logits)
        return torch.cat(parts, 1)

    compare(name, target, dtype, logits, mask.bool())


THREE = ("Llama", "Gemma3Text", "GptOss")
WAYS = [("static", name) for name in CONFIGS]
WAYS += itertools.product(("dynamic", "beams", "draft model", "prompt lookup"), THREE)


@pytest.mark.parametrize(("how", "name"), WAYS)
def test_generated_tokens(how, name, target, dtype):
    if dtype != torch.float32 and how == "beams":
        pytest.skip("beams of two roundings differ")
    drafts = how in ("draft model", "prompt lookup")
    ids, mask = tokens(target, 21, *(() if drafts else (13,)))
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    if how == "beams":
        options["num_beams"] = 3
    eager, model = pair(name, target, dtype)
    expected = eager.generate(ids, **options)[:, 21:]
    if how == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    if how == "draft model":
        options["assistant_model"] = pair("Mistral", target, dtype)[1]
    if how == "prompt lookup":
        options["prompt_lookup_num_tokens"] = 3
    got = model.generate(ids, **options)[:, 21:]
    assert_greedy(name, target, dtype, ids, mask, got, expected)


HEADS = {**GROUPED, "num_attention_heads": 8}
ENCODER = {**GROUPED, "is_causal": False}
HALF_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
OTHER_CONFIGS = {
    "8 heads over 8": transformers.LlamaConfig(**{**HEADS, "num_key_value_heads": 8}),
    "8 heads over 1": transformers.LlamaConfig(**{**HEADS, "num_key_value_heads": 1}),
    "an encoder": transformers.LlamaConfig(**ENCODER),
    # on both sides, in half of the layers
    "an encoder with windows": transformers.Qwen3Config(**ENCODER, **HALF_WINDOWS),
}


@pytest.mark.parametrize("config", OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
def test_other_configs(config, target, dtype):
    eager, model = (
        AutoModel.from_config(copy.deepcopy(config), attn_implementation=each) for each in NAMES
    )
    model.load_state_dict(eager.state_dict())
    ids, mask = tokens(target, 23, 11)
    exact, got, expected = (
        m.eval().to(target.device, kind)(input_ids=ids, attention_mask=mask)[0][mask.bool()]
        for m, kind in ((eager, torch.float32), (model, dtype), (eager, dtype))
    )
    assert_close(got, expected, dtype, exact)


@pytest.mark.parametrize("name", THREE)
def test_continuous_batching(name, target, dtype):
    """Prompts in chunks, together with requests that decode, on the paged cache of transformers."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip(f"transformers {transformers.__version__} has other continuous batching")
    eager, model = pair(name, target, dtype)
    prompts = [tokens(target, n, seed=n)[0] for n in (5, 33, 18)]
    outputs = model.generate_batch(
        inputs=[prompt[0].tolist() for prompt in prompts],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=32, max_batch_tokens=24, use_cuda_graph=False
        ),
        progress_bar=False,
    )
    got = {len(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    for prompt in prompts:
        ran = target.to(torch.tensor([got[prompt.shape[1]]]))
        expected = eager.generate(prompt, max_new_tokens=6, do_sample=False)[:, prompt.shape[1] :]
        assert_greedy(name, target, dtype, prompt, torch.ones_like(prompt), ran, expected)


def test_masks_of_their_own(target, dtype):
    """A 4-D mask, bool or of 0 and -inf, replaces causal and the window."""
    ids, _ = tokens(target, 19, 19)
    seen = torch.rand(2, 1, 19, 19) < 0.5
    seen = target.to(seen | torch.eye(19, dtype=torch.bool))
    least = torch.finfo(dtype).min
    added = torch.where(seen, 0.0, least).to(dtype)

    def logits(model):
        eager = model.config._attn_implementation == "eager"
        form = added.to(model.dtype) if eager else seen
        return model(input_ids=ids, attention_mask=form).logits

    got = compare("Mistral", target, dtype, logits)
    model = pair("Mistral", target, dtype)[1]
    assert torch.equal(model(input_ids=ids, attention_mask=added).logits, got)


@pytest.mark.parametrize("padded", [False, True])
def test_encoders(target, dtype, padded):
    """Bert, and the cross-attention of Bart: more queries than keys, and fewer."""
    ids, mask = (x.flip(1) for x in tokens(target, 29, 11 if padded else 29))
    options = {"input_ids": ids, "attention_mask": mask}

    def states(model):
        return model(**options).last_hidden_state

    compare("Bert", target, dtype, states, mask.bool())
    for queries in (9, 37):
        options["decoder_input_ids"] = tokens(target, queries, queries, seed=3)[0]
        compare("Bart", target, dtype, states)


MASKS = transformers.masking_utils
# The first 7 tokens see each other; a window without causal.
FUNCTIONS = [
    (MASKS.create_causal_mask, {"or_mask_function": lambda b, h, q, k: k < 7}),
    (MASKS.create_bidirectional_mask, {"and_mask_function": MASKS.sliding_window_overlay(5)}),
]


@pytest.mark.parametrize(("create", "function"), FUNCTIONS, ids=["prefix", "window"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2Moe"])
def test_mask_functions_that_bounds_do_not_describe(name, create, function, target, dtype):
    ids, _ = tokens(target, 19, 19)

    def logits(model):
        mask = create(model.config, model.get_input_embeddings()(ids), None, None, **function)
        masks = {"full_attention": mask, "sliding_attention": mask}
        return model(input_ids=ids, attention_mask=masks if name == "Qwen2Moe" else mask).logits

    compare(name, target, dtype, logits)


def test_compiled(target, dtype, plans):
    """Every attention is a graph break, and the mask keeps what it knows."""
    model = copy.deepcopy(pair("Gemma3Text", target, dtype)[1])
    model.config.num_hidden_layers = 2
    ids, mask = tokens(target, 22, 9)
    compiled = torch.compile(model, backend="eager")
    got = compiled(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    assert len(plans) == 2
    expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(got, expected)


def test_autocast(target, dtype):
    """Queries may be float32 there; products are not."""
    eager, model = pair("Llama", target, torch.float32)
    ids, _ = tokens(target, 25)
    exact = eager(input_ids=ids).logits
    with torch.autocast(target.device, torch.bfloat16):
        got, expected = (m(input_ids=ids).logits for m in (model, eager))
    assert got.dtype == expected.dtype
    assert_close(got, expected, torch.bfloat16, exact)


@pytest.fixture
def waits(target):
    """Returns calls that wait for a GPU, and turn(on), which begins and ends their recording."""
    calls, patch = [], pytest.MonkeyPatch()

    def counted(name, method):
        return lambda *args, **kwargs: calls.append(name) or method(*args, **kwargs)

    def turn(on):
        patch.undo()
        if on:
            for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"):
                method = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, counted(name, method))
        if target.device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield calls, turn
    turn(False)


@pytest.mark.parametrize(
    "batch",
    ["even", "even, copied", "padded", "padded, copied", "packed", "packed by ends", "own mask"],
)
def test_one_plan_for_each_form_and_no_wait(batch, target, dtype, waits, plans):
    """Sliding and full attention plan in the first layer of each; the layers after these wait for
    nothing, also where a layer gets a copy of the mask as on another GPU."""
    model = pair("Gemma3Text", target, dtype)[1]
    copies = "copied" in batch
    length = 27 + copies  # another than in the test before, which has its plans
    ids, mask = tokens(target, length, 14, seed=5)
    options = {"use_cache": False}
    if batch.startswith("padded"):
        options["attention_mask"] = mask
    if batch.startswith("packed"):
        ids, step = ids[:1], 9 if batch == "packed" else 8
        options["position_ids"] = target.to(torch.arange(length) % step)[None]
    if batch == "packed by ends":
        ends = target.to(torch.tensor([*range(0, length, step), length]).int())
        options["cu_seq_lens_q"] = options["cu_seq_lens_k"] = ends
    if batch == "own mask":
        seen = torch.rand(2, 1, length, length, device=target.device) < 0.5
        options["attention_mask"] = dict.fromkeys(SLIDING, seen)

    def copied(module, args, kwargs):
        if copies and kwargs["attention_mask"] is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"].to(target.device, copy=True)
        return args, kwargs

    calls, turn = waits
    layers = model.model.layers
    handles = [x.self_attn.register_forward_pre_hook(copied, with_kwargs=True) for x in layers]
    handles.append(layers[1].register_forward_hook(lambda *_: turn(True)))
    handles.append(layers[3].register_forward_hook(lambda *_: turn(False)))
    try:
        for _ in range(2):  # the second time the plans have the same lengths
            model(input_ids=ids, **options)
            # A mask of one's own says all, so that a window makes no other form.
            assert len(plans) == (1 if batch == "own mask" else 2)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []


def test_ends_that_change_in_place(target, dtype):
    """Inference tensors count no writes; the next forward pass reads them again all the same."""
    model = pair("Llama", target, dtype)[1]
    ids, _ = tokens(target, 20)
    with torch.inference_mode():
        ends = target.to(torch.tensor([0, 5, 20]).int())
        options = {"use_cache": False, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        model(input_ids=ids, **options)
        ends[1] = 12
        got = model(input_ids=ids, **options).logits
        fresh = {**options, "cu_seq_lens_q": ends.clone(), "cu_seq_lens_k": ends.clone()}
        assert torch.equal(got, model(input_ids=ids, **fresh).logits)


def test_names(target, dtype):
    config, ids = config_of("GptOss"), tokens(target, 9)[0]
    for name in ("preflash", "paged|preflash"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=dtype)
        model.set_attn_implementation("eager")
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == "preflash"
        assert model.to(target.device)(input_ids=ids).logits.shape == (1, 9, 61)


def test_models_on_two_gpus(target, dtype):
    if target.device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("one device")
    here = pair("Gemma3Text", target, dtype)[1]
    there = copy.deepcopy(here).to("cuda:1")
    ids, mask = tokens(target, 25, 11)
    for _ in range(2):
        expected, got = (
            model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            for model, device in ((here, "cuda:0"), (there, "cuda:1"))
        )
        assert torch.equal(got.cpu(), expected.cpu())


@pytest.fixture
def layer(target, dtype):
    """Returns Mistral, and attention() of a layer on masks that no mask function made."""
    model = pair("Mistral", target, dtype)[1]
    module = model.model.layers[0].self_attn
    q, k, v = (target.to(torch.randn(2, heads, 19, 32).to(dtype)) for heads in (4, 2, 2))

    def attention(mask, kind=None, **changes):
        options = {"scaling": 0.2, "sliding_window": 9, **changes}
        return integration.attention(module, q, k.to(kind), v.to(kind), mask, **options)[0]

    return model, attention


def test_masks_of_other_code(target, layer):
    model, attention = layer
    known = tokens(target, 19, 12)[1]
    ours = MASKS.create_sliding_window_causal_mask(
        model.config, target.to(torch.zeros(2, 19, 4)), known, None
    )
    assert torch.equal(attention(known), attention(ours))
    encoder = copy.deepcopy(model.config)
    encoder.is_causal = False  # what the layer does not know
    ours = MASKS.create_bidirectional_mask(encoder, target.to(torch.zeros(2, 19, 4)), None)
    assert torch.equal(attention(ours), attention(None, sliding_window=None, is_causal=False))


FALCON, HOLE = transformers.FalconConfig(), torch.arange(19) != 4
# A call with attention(), a padding mask, ids and Mistral; the error; what it says.
REFUSED = [
    (lambda call: call.attention(pad(call.mask, (0, 1), value=1)), ValueError,
     "20 slots for 19 keys"),
    (lambda call: call.attention(call.mask[None]), ValueError, "3 dimensions"),
    (lambda call: call.attention(call.mask, torch.float16), TypeError,
     r"kv_data_type=torch\.float16: must be q's dtype"),
    (lambda call: call.attention(call.mask * HOLE.to(call.mask)), NotImplementedError,
     "padding inside a sequence"),
    (lambda call: call.attention(call.mask.new_ones(2, 4, 19, 19) > 0), NotImplementedError,
     "one mask for each head"),
    (lambda call: call.attention(None, is_causal=False), NotImplementedError,
     "a window without causal"),
    (lambda call: call.attention(call.mask, dropout=0.5), NotImplementedError,
     "dropout must be 0"),
    (lambda call: call.model(call.ids, attention_mask=call.bias), NotImplementedError, "bias"),
    (lambda call: call.model(call.ids, output_attentions=True), NotImplementedError,
     "output_attentions: attn_implementation"),
    (lambda call: torch.enable_grad()(call.model)(call.ids), NotImplementedError, "no gradients"),
    (lambda _: AutoModel.from_config(FALCON, attn_implementation="preflash"), ValueError,
     "attention of its own"),
    (lambda _: integration.register("fa4"), ValueError,
     "backend='fa4': must be one of auto, fa3, fa2, cpu, cudnn"),
    (lambda _: integration.register("trtllm-gen"), ValueError,
     "PREFLASH_BACKEND=auto in the environment"),
    (lambda _: integration.register(None), TypeError,
     "backend must be a str, one of auto, fa3, fa2, cpu, cudnn"),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "error", "says"), REFUSED)
def test_refusals(target, dtype, layer, refused, error, says):
    """A model then computes as before, on the backend before."""
    ids, mask = tokens(target, 19, 12)
    bias = torch.full((2, 1, 19, 19), 0.5, device=target.device, dtype=dtype)
    model, attention = layer
    call = SimpleNamespace(model=model, attention=attention, ids=ids, mask=mask, bias=bias)
    with pytest.raises(error, match=says):
        refused(call)
    assert model(ids).logits.isfinite().all()
