"""Models whose tokens see those before and after them: what a request gets has the same bits alone and among others, in
any order, and is near what Transformers gives in float64.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.bisected import assert_each_is_named
from tests.engine.engines import OF_DEVICE, SETTINGS, Engine, arguments_of, some_exhaustive, tokens
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.bisect.engine import WORKER_EXTENSION

pytestmark = pytest.mark.engine

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GQA = {"num_key_value_heads": 2, "head_dim": 64}
OF_ROBERTA = {
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "max_position_embeddings": 1026,
    "position_embedding_type": "absolute",
}
LENGTHS = (300, 45, 1, 130, 257, 2)
"""Shorter and longer than a tile, a split and a window."""
TOLERANCE = 2e-3
"""Of what an engine in fp32 gives, beside float64: rounding of three layers."""

Model = Callable[[], torch.nn.Module]
Given = Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]


def of_first(model: Any, ids: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    """The first token's hidden state; of length 1 unless it is not wanted so."""
    return _embedding(model(input_ids=ids).last_hidden_state[0, 0], wanted)


def of_mean(model: Any, ids: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    return _embedding(model(input_ids=ids).last_hidden_state[0].mean(0), wanted)


def of_dense(model: Any, ids: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    """The mean through the layers that are in folders of the model's checkpoint."""
    row = model(input_ids=ids).last_hidden_state[0].mean(0)
    for folder, layer in zip(sorted(Path(model.name_or_path).glob("*_Dense")), DENSE, strict=True):
        tensors = load_file(folder / "model.safetensors")
        bias = tensors["linear.bias"].double() if layer.bias else 0
        row = getattr(torch.nn, layer.activation)()(tensors["linear.weight"].double() @ row + bias)
    return _embedding(row, wanted)


def of_last(model: Any, ids: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    return _embedding(model(input_ids=ids).last_hidden_state[0, -1], wanted)


def _embedding(row: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    return row / row.norm() if wanted.get("use_activation", True) else row


def of_pair(model: Any, ids: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    """Logits of a pair of texts, of which the second begins somewhere."""
    begins = SECOND if "extra_kwargs" in wanted else ids.shape[1]
    types = (torch.arange(ids.shape[1]) >= begins).long()[None]
    with_types = {"token_type_ids": types} if model.config.model_type == "bert" else {}
    return model(input_ids=ids, **with_types).logits[0]


def of_tokens(model: Any, ids: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    return model(input_ids=ids).logits[0]


@dataclass(frozen=True)
class Dense:
    """A linear layer that sentence-transformers has behind a pooler, of so many outputs."""

    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        model: makes it.
        wanted: what requests ask for.
        given: what Transformers gives, but for activations of classes.
        settings: of the engine.
        dense: layers behind the pooler.
    """

    model: Model
    wanted: tuple[dict[str, Any], ...]
    given: Given
    settings: dict[str, Any] = field(default_factory=dict)
    dense: tuple[Dense, ...] = ()


SECOND = 20
"""Where the second text of a pair begins."""
OF_SECOND = (
    SECOND if patch_points.installed_version().startswith("0.32.") else [SECOND, SIZES["max_position_embeddings"]]
)
"""The same as vLLM's server tells its engine; since 0.33 a range."""
EMBEDDINGS = ({"task": "embed", "use_activation": False}, {"task": "embed"}, {"task": "token_embed"})
CLASSES = (
    {"task": "classify", "use_activation": False},
    {"task": "classify", "use_activation": False, "extra_kwargs": {"compressed_token_type_ids": OF_SECOND}},
    {"task": "classify"},
)
TOKEN_CLASSES = ({"task": "token_classify", "use_activation": False}, {"task": "token_classify"})
MEAN = {"runner": "pooling", "pooler_config": json.dumps({"pooling_type": "MEAN"})}
MODERN = SIZES | {
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 3,
    "local_attention": 32,
    "initializer_cutoff_factor": 5.0,
}


def modern(kind: str, **changes: Any) -> Model:
    return lambda: getattr(transformers, kind)(transformers.ModernBertConfig(**MODERN, **changes))


def bert(kind: str, **changes: Any) -> Model:
    return lambda: getattr(transformers, kind)(transformers.BertConfig(**SIZES | changes))


def roberta(kind: str, **changes: Any) -> Model:
    return lambda: getattr(transformers, kind)(transformers.XLMRobertaConfig(**SIZES | OF_ROBERTA | changes))


def gemma() -> torch.nn.Module:
    """As EmbeddingGemma without the linear layers that sentence-transformers has behind it."""
    config = transformers.Gemma3TextConfig(
        **SIZES, **GQA, query_pre_attn_scalar=64, sliding_window=64, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.Gemma3TextModel(config)


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, **GQA, is_causal=False))


DENSE = (Dense(1536, bias=False, activation="Identity"), Dense(384, bias=True, activation="Tanh"))
"""As EmbeddingGemma has them, but for a bias and an activation, as others do."""
BEHIND = "EmbeddingGemma with layers behind its pooler"

CASES = {
    "BERT": Case(bert("BertModel"), EMBEDDINGS, of_first),
    "BERT with heads of 32, pooled by the mean": Case(
        bert("BertModel", num_attention_heads=12), EMBEDDINGS[:2], of_mean, MEAN
    ),
    "BERT with GELU by tanh": Case(bert("BertModel", hidden_act="gelu_new"), EMBEDDINGS, of_first),
    "BERT of pairs": Case(bert("BertForSequenceClassification", num_labels=1), CLASSES, of_pair),
    "BERT of tokens": Case(bert("BertForTokenClassification", num_labels=5), TOKEN_CLASSES, of_tokens),
    "XLM-RoBERTa": Case(roberta("XLMRobertaModel"), EMBEDDINGS, of_first),
    "XLM-RoBERTa of pairs": Case(
        roberta("XLMRobertaForSequenceClassification", num_labels=1),
        (CLASSES[0], CLASSES[2]),
        of_pair,
    ),
    "XLM-RoBERTa of tokens": Case(
        roberta("XLMRobertaForTokenClassification", num_labels=5),
        TOKEN_CLASSES,
        of_tokens,
    ),
    "ModernBERT": Case(modern("ModernBertModel"), EMBEDDINGS, of_first),
    "ModernBERT of pairs": Case(
        modern("ModernBertForSequenceClassification", num_labels=1, classifier_pooling="mean"),
        (CLASSES[0], CLASSES[2]),
        of_pair,
    ),
    "ModernBERT of tokens": Case(modern("ModernBertForTokenClassification", num_labels=5), TOKEN_CLASSES, of_tokens),
    "EmbeddingGemma": Case(gemma, EMBEDDINGS[:2], of_mean, MEAN),
    BEHIND: Case(gemma, EMBEDDINGS[:2], of_dense, MEAN, DENSE),
    "Qwen3 that is not causal": Case(
        qwen3,
        EMBEDDINGS,
        of_last,
        {"runner": "pooling", "convert": "embed", "hf_overrides": json.dumps({"is_causal": False})},
    ),
}
QUICK = ("BERT of pairs",)
"""That run also where each minute counts."""


ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def pools() -> None:
    version = pytest.importorskip("vllm").__version__
    if not version.startswith(RAN.pooling["cuda" if ON_GPU else "cpu"]):
        pytest.skip(f"pooling with vLLM {version} is refused")


def prompt(length: int, seed: int) -> list[int]:
    return [max(5, token) for token in tokens(length, seed)]


def targets(case: Case) -> list[dict[str, Any]]:
    return [{"prompt": prompt(length, length), "params": wanted} for length in LENGTHS for wanted in case.wanted]


def others(case: Case, count: int) -> list[dict[str, Any]]:
    wanted = case.wanted
    return [{"prompt": prompt(1 + 37 * i % 200, 500 + i), "params": wanted[i % len(wanted)]} for i in range(count)]


def runs(case: Case) -> dict[str, tuple[list[dict[str, Any]], slice]]:
    """The requests of each run, and where the targets are."""
    asked = targets(case)
    count = len(asked)
    alone = {f"alone {number}": ([target], slice(1)) for number, target in enumerate(asked)}
    return alone | {
        "together": (asked, slice(count)),
        "reversed": (asked[::-1], slice(None, None, -1)),
        "behind 3": ([*others(case, 3), *asked], slice(3, None)),
        "before 40": ([*asked, *others(case, 40)], slice(count)),
    }


def given_by(case: Case, folder: Path, shared: Path, flag: str, dtype: str = "float32") -> dict[str, list[Any]]:
    """What an engine gives the targets in each run; its checkpoint is left in the folder."""
    torch.manual_seed(0)
    model = case.model()
    with torch.no_grad():  # else biases would be 0, and norms 1
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    save_dense(case.dense, folder)
    for file in shared.glob("tokenizer*"):
        shutil.copy(file, folder)
    limits = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "dtype": dtype}
    settings = {"enforce_eager": True} if flag == "0" else {}
    is_bisected = case is CASES[QUICK[0]] and flag == "1" and not ON_GPU
    settings |= {"worker_extension_cls": WORKER_EXTENSION} if is_bisected else {}
    arguments = arguments_of(limits | case.settings | settings | OF_DEVICE)
    with Engine(str(folder), arguments, flag, SETTINGS, patience=400) as engine:
        found = {
            name: (engine.call("tests.engine.pooled:pooled", requests, "cache"), where)
            for name, (requests, where) in runs(case).items()
        }
        multiplied = engine.call("tests.engine.pooled:products", targets(case)[0]) if case.dense else []
        bisected = engine.call("tests.engine.bisected:pooled", {"task": "classify"}) if is_bisected else {}
    assert flag == "0" or found["before 40"][0]["largest"] > 1
    return {name: done["given"][where] for name, (done, where) in found.items()} | {
        "multiplied": multiplied,
        "bisected": bisected,
    }


def save_dense(layers: tuple[Dense, ...], folder: Path) -> None:
    """Layers behind the pooler, in the form of sentence-transformers."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    inputs = SIZES["hidden_size"]
    for number, layer in enumerate(layers, 1):
        linear = torch.nn.Linear(inputs, layer.outputs, layer.bias)
        held = {f"linear.{name}": weight.data for name, weight in linear.named_parameters()}
        about = {"in_features": inputs, "out_features": layer.outputs, "bias": layer.bias}
        about["activation_function"] = f"torch.nn.modules.{layer.activation}"
        (into := folder / f"{number}_Dense").mkdir()
        (into / "config.json").write_text(json.dumps(about))
        save_file(held, into / "model.safetensors")
        kind = "sentence_transformers.models.Dense"
        modules.append({"idx": number, "name": str(number), "path": into.name, "type": kind})
        inputs = layer.outputs
    if layers:
        (folder / "modules.json").write_text(json.dumps(modules))


def moved(found: dict[str, list[Any]]) -> list[str]:
    """Runs in which a target got something else than alone."""
    count = len(found["together"])
    alone = [found[f"alone {number}"][0] for number in range(count)]
    return [
        f"{name}: {number}"
        for name in ("together", "reversed", "behind 3", "before 40")
        for number, (given, expected) in enumerate(zip(found[name], alone, strict=True))
        if given != expected
    ]


@pytest.mark.parametrize("name", some_exhaustive(CASES, QUICK))
def test_a_request_has_the_same_bits_in_any_company_and_is_near_float64(
    name: str, tmp_path: Path, checkpoint: Path
) -> None:
    case = CASES[name]
    found = given_by(case, tmp_path, checkpoint, "1")
    assert moved(found) == []
    if bisected := found["bisected"]:
        assert_each_is_named(bisected)
    bits = [(tuple(one["shape"]), one["bits"]) for one in found["together"]]
    assert len(set(bits)) >= len(LENGTHS) * len({wanted["task"] for wanted in case.wanted}), "prompts look alike"

    model = type(case.model()).from_pretrained(tmp_path, attn_implementation="eager").double().eval()
    kinds = len(case.wanted)
    for number, length in enumerate(LENGTHS):
        for kind, wanted in enumerate(case.wanted):
            if wanted.get("use_activation", True) and wanted["task"] != "embed":
                continue
            given = found["together"][number * kinds + kind]
            got = torch.frombuffer(bytearray.fromhex(given["fp32"]), dtype=torch.float32).double()
            with torch.no_grad():
                expected = case.given(model, torch.tensor([prompt(length, length)]), wanted).flatten().double()
            assert got.shape == expected.shape
            error = (got - expected).norm() / expected.norm()
            assert error < TOLERANCE, f"{length} tokens, {wanted}: {error:.1e}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("flag", ["0", "1"])
def test_layers_behind_a_pooler_are_matmuls_of_the_mode(flag: str, tmp_path: Path, checkpoint: Path) -> None:
    found = given_by(CASES[BEHIND], tmp_path, checkpoint, flag, "bfloat16")
    sizes = [SIZES["hidden_size"], *(layer.outputs for layer in DENSE)]
    assert found["multiplied"] == ([list(pair) for pair in pairwise(sizes)] if flag == "1" else [])
    assert flag == "0" or moved(found) == []


@pytest.mark.exhaustive
def test_an_encoder_in_bf16_has_the_same_bits_in_any_company(tmp_path: Path, checkpoint: Path) -> None:
    assert moved(given_by(CASES["ModernBERT"], tmp_path, checkpoint, "1", "bfloat16")) == []


@pytest.mark.exhaustive
def test_plain_vllm_fails_the_same_comparison(tmp_path: Path, checkpoint: Path) -> None:
    assert moved(given_by(CASES["BERT"], tmp_path, checkpoint, "0"))
