"""What a patched model does not cover refuses, in one line."""

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import (
    Lfm2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralForCausalLM,
    NemotronHConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from tests.hf.models import DEVICE, EXPERTS, OLMOE, SHORT_CONVS, STATE_SPACES, model
from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import patch, support
from vllm_batch_invariant.hf.families import FAMILIES
from vllm_batch_invariant.integration.reviews import patch_points

TOKENS = torch.ones(2, 6, dtype=torch.int64, device=DEVICE)


def refuses(action: Callable[[], object], what: str) -> None:
    with pytest.raises(NotCovered, match=what) as refusal:
        action()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("what", "changed"),
    {
        "sliding window layers": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "dropout of attention": {"attention_dropout": 0.1},
        r"a bias at model\.layers\.0\.self_attn\.q_proj": {"attention_bias": True},
        "activation gelu": {"hidden_act": "gelu"},
        "rotary embedding of type linear": {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
        },
        "hidden states": {"output_hidden_states": True},
    }.items(),
)
def test_a_configuration_without_a_proof_is_refused(what: str, changed: dict) -> None:
    refuses(lambda: patch(model(**changed)), what)


@pytest.mark.parametrize("changed", [{"norm_topk_prob": True}, {"clip_qkv": 8.0}, {"rms_norm_eps": 1e-6}], ids=str)
def test_what_the_engines_model_does_not_read_is_refused(changed: dict) -> None:
    [(name, value)] = changed.items()
    refuses(lambda: patch(model(torch.bfloat16, OlmoeConfig, **OLMOE | changed)), f"{name}={value} in a trainer")


def test_an_untied_lfm2_is_refused() -> None:
    untied = SHORT_CONVS | {"tie_word_embeddings": False}
    refuses(lambda: patch(model(torch.bfloat16, Lfm2Config, **untied)), "tie_word_embeddings=False")


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}


@pytest.mark.parametrize("kind", [MistralForCausalLM, LlamaForSequenceClassification])
def test_another_architecture_is_refused(kind: type) -> None:
    other = kind(kind.config_class(vocab_size=64, num_hidden_layers=1, pad_token_id=0, **SMALL))
    refuses(lambda: patch(other), kind.__name__)


def test_a_class_derived_from_one_with_a_patch_is_refused() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """One that may compute anything, by the same name."""

    other = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **SMALL))
    refuses(lambda: patch(other), "a trainer's LlamaForCausalLM")


def test_a_tree_of_tensor_parallel_workers_is_refused_where_the_engine_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(envs.TP_TREE.name, "4")
    by_name = {family.prefix: family for family in FAMILIES}
    for name, device in (("Qwen3", "cuda"), ("Qwen3Moe", "cpu"), ("NemotronH", "cpu")):
        said = f"VLLM_BATCH_INVARIANT_TP_TREE=4 in a trainer's {name} on device '{device}'"
        refuses(lambda name=name, device=device: support.check_environment(by_name[name], device), said)


def test_experts_of_a_nemotron_h_are_refused() -> None:
    blocks = {"layers_block_type": ["linear_attention", "moe"], "moe_intermediate_size": 64}
    shared = {"moe_shared_expert_intermediate_size": 64}
    refuses(lambda: patch(model(torch.bfloat16, NemotronHConfig, **STATE_SPACES | blocks | shared)), "experts of a Nem")


@pytest.mark.parametrize("changed", [{"mlp_hidden_act": "silu"}, {"mamba_hidden_act": "relu2"}], ids=str)
def test_other_activations_of_a_nemotron_h_are_refused(changed: dict) -> None:
    [(name, value)] = changed.items()
    refuses(lambda: patch(model(torch.bfloat16, NemotronHConfig, **STATE_SPACES | changed)), f"{name}={value}")


def test_a_device_on_which_nobody_compared_a_family_is_refused() -> None:
    olmoe = next(family for family in FAMILIES if family.prefix == "Olmoe")
    support.check_environment(olmoe, "cpu")
    refuses(lambda: support.check_environment(olmoe, "cuda"), "a trainer's Olmoe on device 'cuda'")


@pytest.mark.skipif(DEVICE == "cuda", reason="a tree is refused on a GPU")
def test_a_tree_whose_slices_do_not_divide_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.TP_TREE.name, "8")
    said = r"TP_TREE=8 for the 192 inputs of model\.layers\.0\.mlp\.down_proj"
    refuses(lambda: patch(model(intermediate_size=192, num_attention_heads=4)), said)


def test_logits_of_a_router_are_refused() -> None:
    asking = model(of=Qwen3MoeConfig, output_router_logits=True, **EXPERTS)
    refuses(lambda: patch(asking), "logits of the router")


def test_an_untested_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "9.0.1")
    refuses(lambda: patch(model()), f"vLLM 9.0.1 on {torch.device(DEVICE).type}: it is newer than")


class Adapter(torch.nn.Linear):
    """A layer in the place of another, as LoRA and quantisation put it."""


def test_a_layer_that_was_replaced_is_refused() -> None:
    adapted = model()
    adapted.model.layers[1].mlp.up_proj = Adapter(192, 320, bias=False, device=DEVICE, dtype=torch.bfloat16)
    refuses(lambda: patch(adapted), r"Adapter at model\.layers\.1\.mlp\.up_proj")


def test_weights_of_two_dtypes_or_of_another_are_refused() -> None:
    mixed = model()
    mixed.lm_head.float()
    refuses(lambda: patch(mixed), r"weights in torch\.bfloat16 and torch\.float32")
    refuses(lambda: patch(model(torch.float64)), r"weights in torch\.float64")


def test_a_device_without_implementations_is_refused() -> None:
    refuses(lambda: patch(model().to("meta")), "weights on meta")


HOLE = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
LATE = torch.arange(5, 11).expand(2, 6)
CUT = torch.tensor([0, 4, 6, 12])
SKIPS = torch.tensor([0, 1, 3, 4, 5, 6]).expand(2, 6)


@pytest.mark.parametrize(
    ("what", "options"),
    {
        "use_cache": {"use_cache": True},
        "past_key_values": {"past_key_values": object()},
        "output_attentions": {"output_attentions": True},
        "an attention mask that is not": {"attention_mask": torch.ones(2, 1, 6, 6)},
        "a batch with holes": {"attention_mask": HOLE},
        "positions of its own": {"position_ids": LATE},
        "holes or positions": {"position_ids": SKIPS},
        "sequences that begin elsewhere": {"cu_seq_lens_q": CUT, "position_ids": torch.arange(6)[None]},
        "than their positions": {"cu_seq_lens_q": CUT, "cu_seq_lens_k": CUT + 1},
    }.items(),
)
def test_a_call_for_something_else_is_refused(what: str, options: dict) -> None:
    placed = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    trainer = patch(model())
    refuses(lambda: trainer(TOKENS, **placed), what)


def test_generation_is_left_to_the_engine() -> None:
    trainer = patch(model())
    refuses(lambda: trainer.generate(TOKENS, max_new_tokens=2), "in a trainer")


def test_autocast_is_refused() -> None:
    trainer = patch(model())
    with torch.autocast(DEVICE, torch.bfloat16):
        refuses(lambda: trainer(TOKENS), "autocast")


def test_more_tokens_than_positions_are_refused() -> None:
    refuses(lambda: patch(model())(TOKENS.repeat(1, 100)), "a sequence of 600 tokens")


@pytest.mark.parametrize("package", ["transformers", "vllm"])
def test_a_package_that_is_not_installed_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = support.find_spec
    monkeypatch.setattr(support, "find_spec", lambda name: None if name == package else found(name))
    refuses(lambda: patch(torch.nn.Linear(1, 1)), "transformers|vLLM")


def test_exact_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.ARITHMETIC.name, "exact")
    refuses(lambda: patch(model()), "VLLM_BATCH_INVARIANT_ARITHMETIC=exact in a trainer")
