"""Models of transformers with small random weights: preflash against eager, logits and tokens."""

from __future__ import annotations

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")

from preflash.integrations import transformers as integration  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}
SLIDING = ["sliding_attention", "full_attention"] * 2

# Sequences are up to 29 tokens and 8 more: the windows end inside.
CONFIGS = {
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 9},
    "Qwen3": GROUPED,
    "Gemma2": {
        **GROUPED, "sliding_window": 9, "layer_types": SLIDING, "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 32,
    },
    "Gemma3Text": {
        **GROUPED, "sliding_window": 8, "layer_types": SLIDING, "query_pre_attn_scalar": 32,
    },
    "Gemma4Text": {
        **GROUPED, "sliding_window": 9, "layer_types": SLIDING, "global_head_dim": 512,
        "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 16,
    },
    "GptOss": {
        **GROUPED, "sliding_window": 9, "layer_types": SLIDING, "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
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
    return cls(**CONFIGS.get(name, SMALL))


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
    return tuple(
        model_of(name, attention, target.device, dtype) for attention in ("eager", "preflash")
    )


def tokens(target, *lengths, seed=1):
    """Right-aligned ids [batch, longest] and their mask."""
    torch.manual_seed(seed)
    ids = torch.randint(2, 61, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return target.to(ids * mask), target.to(mask.long())


def assert_close(got, expected, dtype, exact=None):
    """exact: the same in float32; bfloat16 models are compared by how far each is from it."""
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
        return
    rounding = (expected.float() - exact.float()).abs().mean()
    assert (got.float() - exact.float()).abs().mean() <= 1.25 * rounding + 1e-3


def assert_greedy(name, target, dtype, prompt, mask, got, expected):
    """The same tokens in float32; in bfloat16 each is the best but for roundings of logits."""
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
    """What call() makes of both models, in float32 also of eager in full precision."""
    eager, model = (call(m)[rows] for m in pair(name, target, dtype))
    exact = None
    if dtype != torch.float32:
        exact = call(model_of(name, "eager", target.device, torch.float32))[rows]
    assert_close(model, eager, dtype, exact)
    return model


@causal
def test_even_batches(name, target, dtype):
    ids, _ = tokens(target, 29, 29)
    compare(name, target, dtype, lambda model: model(input_ids=ids).logits)


@causal
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_batches(name, target, dtype, side):
    ids, mask = tokens(target, 29, 17, 1)
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    if side == "both":
        mask[0, -3:] = 0
    compare(
        name, target, dtype,
        lambda model: model(input_ids=ids, attention_mask=mask).logits, rows=mask.bool(),
    )  # fmt: skip


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
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(name, target, dtype, cache):
    ids, mask = tokens(target, 21, 13)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    eager, model = pair(name, target, dtype)
    expected = eager.generate(ids, attention_mask=mask, **options)[:, 21:]
    if cache == "static":
        options["cache_implementation"] = "static"
    got = model.generate(ids, attention_mask=mask, **options)[:, 21:]
    assert_greedy(name, target, dtype, ids, mask, got, expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_static_cache_without_mask(name, target, dtype):
    ids, _ = tokens(target, 20, 20)

    def decoded(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        first = model(input_ids=ids[:, :13], past_key_values=cache).logits
        return torch.cat([first, model(input_ids=ids[:, 13:], past_key_values=cache).logits], 1)

    compare(name, target, dtype, decoded)


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GptOss"])
def test_continuous_batching(name, target, dtype):
    """Prompts in chunks, beside requests that decode, on the paged cache of transformers."""
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


@pytest.mark.parametrize("padded", [False, True])
def test_bidirectional(target, dtype, padded):
    ids, mask = tokens(target, 29, 11 if padded else 29)
    ids, mask = ids.flip(1), mask.flip(1)
    compare(
        "Bert", target, dtype,
        lambda model: model(input_ids=ids, attention_mask=mask).last_hidden_state, mask.bool(),
    )  # fmt: skip


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


def test_mask_functions_that_bounds_do_not_describe(target, dtype):
    integration.register(target.backend)
    config = model_of("Llama", "preflash", target.device, dtype).config
    x = torch.zeros(2, 12, 4, device=target.device)
    mask = transformers.masking_utils.create_causal_mask(
        config, x, None, None, or_mask_function=lambda b, h, q, k: k == 11
    )
    expected = torch.ones(12, 12, dtype=torch.bool).tril()
    expected[:, 11] = True
    assert torch.equal(mask.cpu(), expected.expand(2, 1, -1, -1))


def test_one_plan_for_each_form_and_forward_pass(target, dtype):
    model = pair("Gemma3Text", target, dtype)[1]
    ids, mask = tokens(target, 27, 14, seed=5)
    before = integration._forms.plans
    model(input_ids=ids, attention_mask=mask)
    assert integration._forms.plans == before + 2  # sliding and full, in four layers
    model(input_ids=ids, attention_mask=mask)
    assert integration._forms.plans == before + 2  # the same lengths again


def test_refusals(target, dtype):
    model = pair("Mistral", target, dtype)[1]
    ids, _ = tokens(target, 9)
    bias = torch.full((1, 1, 9, 9), 0.5, device=target.device, dtype=dtype)
    with pytest.raises(NotImplementedError, match="bias"):
        model(input_ids=ids, attention_mask=bias)
    with pytest.raises(NotImplementedError, match="no attention weights"):
        model(input_ids=ids, output_attentions=True)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="no gradients"):
        model(input_ids=ids)
    dropping = AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**GROUPED, attention_dropout=0.5), attn_implementation="preflash"
    ).train()
    with pytest.raises(NotImplementedError, match="dropout must be 0"):
        dropping(input_ids=ids.cpu())
