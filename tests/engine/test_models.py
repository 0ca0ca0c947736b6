"""Architectures with other norms, activations, masks and dtypes than the main model's."""

import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module

import pytest
import torch
import transformers

from tests.engine import engines as engine_tests
from tests.engine.engines import OF_DEVICE, Result, concurrent_requests, run, selected, some_exhaustive, tokens

pytestmark = pytest.mark.engine

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {"num_key_value_heads": 2, "head_dim": 64}
OF_128 = {"original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}

MODELS = {
    "gemma2 with soft-caps": (
        transformers.Gemma2Config(**SIZES, **GQA, sliding_window=32, query_pre_attn_scalar=64),
        torch.bfloat16,
    ),
    "bloom with alibi": (
        transformers.BloomConfig(vocab_size=4096, hidden_size=256, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        torch.float32,
    ),
    "phi with layer norm and gelu": (transformers.PhiConfig(**SIZES), torch.float16),
    "granite with sinks and a sliding window": (
        transformers.GraniteConfig(
            **SIZES,
            num_key_value_heads=2,
            attention_multiplier=0.125,
            attention_sinks=True,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=48,
        ),
        torch.bfloat16,
    ),
    "olmo3 with angles for each kind of layer": (
        transformers.Olmo3Config(
            **SIZES,
            num_key_value_heads=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=48,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": YARN | OF_128 | {"attention_factor": 1.2},
            },
        ),
        torch.bfloat16,
    ),
    "ministral3 with queries scaled by their positions": (
        transformers.Ministral3Config(
            **SIZES,
            **GQA,
            rope_parameters=YARN | OF_128 | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            llama_4_scaling=OF_128 | {"beta": 0.1},
        ),
        torch.bfloat16,
    ),
}


QUICK = ("gemma2 with soft-caps", "granite with sinks and a sliding window")
"""Those that run also where each minute counts."""
CONCURRENT = (1, 3, 17, 40)


def checkpoint(config: transformers.PretrainedConfig, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """Random weights, and sinks of attention where the configuration has them, which Hugging Face's model has not."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if getattr(config, "attention_sinks", False):
        for layer in model.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(torch.linspace(-1, 5, config.num_attention_heads))
    return model.to(dtype)


@pytest.fixture(scope="module")
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Result]]]:
    """Every model in an engine of its own, two at a time: most of an engine's start takes one core."""
    target = engine_tests.request(tokens(150, 1), max_tokens=12)
    steps = [{"name": "alone", "requests": [target]}]
    steps += [{"name": f"with {n}", "requests": [*concurrent_requests(n, n), target]} for n in CONCURRENT]
    limits = {"max_model_len": 1024, "skip_tokenizer_init": True, "max_num_batched_tokens": 128, "max_num_seqs": 64}
    with ThreadPoolExecutor(2) as pool:
        engines = {}
        for name in selected(request, "name"):
            config, dtype = MODELS[name]
            path = tmp_path_factory.mktemp("model")
            checkpoint(config, dtype).save_pretrained(path)
            # vLLM would serve weights of fp32 in bf16
            engine = {"model": str(path), "dtype": str(dtype).removeprefix("torch.")} | limits | OF_DEVICE
            engines[name] = pool.submit(run, engine, steps, "1")
        yield engines
        pool.shutdown(wait=True, cancel_futures=True)


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_an_architecture_gives_the_same_bits_with_any_concurrent_requests(
    name: str, asked: dict[str, Future[Result]]
) -> None:
    if "sinks" in name and "sinks" not in inspect.getsource(import_module("vllm.model_executor.models.granite")):
        pytest.skip("this vLLM's Granite has no sinks")
    result = asked[name].result()
    for count in CONCURRENT:
        assert result.completions(f"with {count}", count) == result.completions("alone"), count
