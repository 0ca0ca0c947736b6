"""Drafters: one for vLLM's method ``custom_class`` that knows the answers, and a draft head."""

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness import dflash
from vllm_batch_invariant.verify.harness.checkpoints import random_weights

ANSWERS = "DRAFTED_ANSWERS"
"""The variable that names a file: a list of prompts with their answers, in token ids, as JSON."""
KINDS = ("right", "wrong", "none", "mixed")


class Drafter:
    """Proposes for each request by the kind that its first token chooses, so that kinds run side by side."""

    def __init__(self, vllm_config: Any) -> None:
        self._answers = json.loads(Path(os.environ[ANSWERS]).read_text())
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._chance = random.Random(0)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: object,
    ) -> list[list[int]]:
        """Drafts of every request of a step.

        Args:
            sampled_token_ids: what the step gave each request.
            num_tokens_no_spec: [requests] tokens that each has.
            token_ids_cpu: [requests, context] these tokens.
        """
        return [
            self._drafts(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _drafts(self, known: list[int]) -> list[int]:
        kind = KINDS[known[0] % len(KINDS)]
        right, wrong = self._continued(known), [self._chance.randrange(self._vocabulary) for _ in range(self._most)]
        if kind == "mixed":
            number = self._chance.randint(0, self._most)
            return [*right[:number], *wrong[number:]][: self._chance.randint(0, self._most)]
        return {"right": right, "wrong": wrong, "none": []}[kind]

    def _continued(self, known: list[int]) -> list[int]:
        for answer in self._answers:
            if answer[: len(known)] == known:
                return answer[len(known) : len(known) + self._most]
        return []

    def load_model(self, target: object) -> None:
        """There is none."""


def make_head(target: Path, folder: Path, method: str) -> Path:
    """Write a draft head of EAGLE's or EAGLE-3's shape with random weights, for the target in a folder."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocabulary, heads, kv_heads, size = of_target["hidden_size"], of_target["vocab_size"], 8, 2, 64
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": vocabulary,
        "max_position_embeddings": of_target["max_position_embeddings"],
        "torch_dtype": "bfloat16",
    }
    if method == "eagle3":
        config["draft_vocab_size"] = vocabulary
        layer, inputs, states = "midlayer.", 2 * hidden, 3 * hidden
        own = {"midlayer.hidden_norm": (hidden,), "midlayer.input_layernorm": (hidden,), "norm": (hidden,)}
        own["lm_head"] = (vocabulary, hidden)
    else:
        layer, inputs, states, own = "layers.0.", hidden, 2 * hidden, {}
    shapes = own | {"fc": (hidden, states)} | layer_shapes(layer, hidden, inputs, heads, kv_heads, size)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(shapes), folder / "model.safetensors")
    return folder


def make_dflash(target: Path, folder: Path, **more: Any) -> Path:
    """Write a draft model of DFlash with random weights and heads of its own, for the target in a folder.

    Args:
        more: fields of its configuration.
    """
    of_target = json.loads((target / "config.json").read_text())
    own = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
    return dflash.write(folder, of_target, **own | more)


def layer_shapes(
    name: str, hidden: int, inputs: int, heads: int, kv_heads: int, size: int
) -> dict[str, tuple[int, ...]]:
    """The weights of a decoder layer behind its first norm."""
    shapes = {
        "self_attn.q_proj": (heads * size, inputs),
        "self_attn.k_proj": (kv_heads * size, inputs),
        "self_attn.v_proj": (kv_heads * size, inputs),
        "self_attn.o_proj": (hidden, heads * size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (hidden, hidden),
        "mlp.up_proj": (hidden, hidden),
        "mlp.down_proj": (hidden, hidden),
    }
    return {name + weight: shape for weight, shape in shapes.items()}


def make_mtp_model(folder: Path) -> Path:
    """Write a small MiMo with random weights, which predicts a second token by a layer of its own."""
    hidden, heads, kv_heads, size = 512, 8, 2, 64
    shape = Shape(
        hidden=hidden, intermediate=hidden, layers=2, heads=heads, kv_heads=kv_heads, head_size=size, dtype="bfloat16"
    )
    make_checkpoint(folder, shape)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if ".q_norm." not in name and ".k_norm." not in name}
    layer = "model.mtp_layers.0."
    shapes = layer_shapes(layer, hidden, hidden, heads, kv_heads, size) | {layer + "input_proj": (hidden, 2 * hidden)}
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    weights |= random_weights(shapes | {layer + norm: (hidden,) for norm in norms})
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.removesuffix("weight") + "bias"] = torch.zeros(len(weights[name]), dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_WITH_EXPERTS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 128,
    "pad_token_id": 0,
}
"""Sizes of a small mixture of experts whose first layer has none."""


def make_glm(folder: Path) -> Path:
    """Write a small GLM-4.5 with random weights, whose last layer predicts a second token."""
    torch.manual_seed(0)
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = transformers.Glm4MoeConfig(head_dim=64, **experts, **_WITH_EXPERTS)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return predict_by_last_layer(folder)


def make_ernie(folder: Path) -> Path:
    """Write a small ERNIE 4.5 with experts and random weights, which has a dense layer that predicts a second token."""
    torch.manual_seed(0)
    experts = {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1}
    config = transformers.Ernie4_5_MoeConfig(**experts, **_WITH_EXPERTS)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    weights, block = load_file(folder / "model.safetensors"), "model.mtp_block.0"
    shapes = {f"model.mtp_{norm}_norm.0": (256,) for norm in ("emb", "hidden")}
    shapes |= {f"{block}.{norm}_layernorm": (256,) for norm in ("input", "post_attention")}
    for name, weight in weights.items():
        if name.startswith("model.layers.0.") and "_proj" in name:
            shapes[name.replace("model.layers.0", block).removesuffix(".weight")] = tuple(weight.shape)
    weights |= random_weights(shapes | {"model.mtp_linear_proj.0": (256, 512)})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def predict_by_last_layer(folder: Path, likely: int | None = None) -> Path:
    """Have the last layer of a small GLM-4.5, GLM-4.7-Flash or DeepSeek-V3 predict a second token. Of few ``likely``
    tokens it guesses some.
    """
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    hidden, number = config["hidden_size"], config["num_hidden_layers"] - 1
    layer = f"model.layers.{number}."
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    weights |= random_weights({layer + name: shape for name, shape in shapes.items()})
    if likely is not None:
        weights["lm_head.weight"] = weights["lm_head.weight"].clone()
        weights["lm_head.weight"][likely:] *= 0.02
    weights[layer + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[layer + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = config | {"num_hidden_layers": number, "num_nextn_predict_layers": 1}
    if kinds := config.get("mlp_layer_types"):
        own["mlp_layer_types"] = kinds[:number]
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def prefer_few(folder: Path, likely: int = 8) -> Path:
    """Have a model or a drafter give few tokens, some of which the other foretells."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = "lm_head.weight"  # or the embeddings
    [name] = [head] if head in tensors else [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][likely:] *= 0.02
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def add_mtp(folder: Path) -> Path:
    """Give a small Qwen3.5, with experts or without, also one that takes images, or Qwen3-Next a layer that predicts a
    second token, of random weights.
    """
    whole, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config, around = whole.get("text_config", whole), "language_model." * ("text_config" in whole)
    last = f"model.{around}layers.{config['layer_types'].index('full_attention')}."
    shapes = {
        f"mtp.layers.0.{name.removeprefix(last)}": tuple(weight.shape)
        for name, weight in weights.items()
        if name.startswith(last)
    }
    hidden = config["hidden_size"]
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)} | {f"mtp.{norm}.weight": (hidden,) for norm in norms}
    made = random_weights({name.removesuffix(".weight"): shape for name, shape in shapes.items()})
    for name in [name for name in shapes if not name.endswith(".weight")]:  # experts that are one tensor
        made[name] = made.pop(f"{name}.weight")
    save_file(weights | made, folder / "model.safetensors", metadata={"format": "pt"})
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def add_glm_ocr_mtp(folder: Path) -> Path:
    """Give a small GLM-OCR a layer that predicts a second token, of random weights."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    text = config["text_config"]
    hidden, number = text["hidden_size"], text["num_hidden_layers"]
    last, layer = (f"model.language_model.layers.{place}." for place in (number - 1, number))
    shapes = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,)) | {"eh_proj": (hidden, 2 * hidden)}
    shapes |= {
        name.removeprefix(last).removesuffix(".weight"): tuple(weight.shape)
        for name, weight in weights.items()
        if name.startswith(last)
    }
    weights |= random_weights({layer + name: shape for name, shape in shapes.items()})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_nemotron_mtp(folder: Path) -> Path:
    """Give a small Nemotron-H with experts a layer of attention and one of experts that predict a second token, as
    Nemotron 3 Super has them, of random weights.
    """
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    kinds, hidden = config["layers_block_type"], config["hidden_size"]
    shapes = {"mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.layers.{norm}.weight": (hidden,) for norm in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    for number, kind in enumerate(("full_attention", "moe")):
        of_target = f"backbone.layers.{kinds.index(kind)}."
        shapes |= {
            name.replace(of_target, f"mtp.layers.{number}."): tuple(weight.shape)
            for name, weight in weights.items()
            if name.startswith(of_target)
        }
    biases = [name for name in shapes if name.endswith("bias")]
    made = random_weights({name.removesuffix(".weight"): of for name, of in shapes.items() if name not in biases})
    made |= {name: torch.zeros(shapes[name]) for name in biases}
    save_file(weights | made, folder / "model.safetensors", metadata={"format": "pt"})
    of_layers = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (folder / "config.json").write_text(json.dumps(config | of_layers))
    return folder


def make_medusa(target: Path, folder: Path, drafts: int) -> Path:
    """Write Medusa's heads with random weights, one a draft, for the target in a folder."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocabulary = of_target["hidden_size"], of_target["vocab_size"]
    shapes = {f"blocks.{head}.layers.0": (hidden, hidden) for head in range(drafts)}
    shapes |= {f"lm_heads.{head}": (vocabulary, hidden) for head in range(drafts)}
    sizes = {"hidden_size": hidden, "vocab_size": vocabulary, "num_heads": drafts, "num_hidden_layers": 1}
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "torch_dtype": "bfloat16"} | sizes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(shapes), folder / "model.safetensors")
    return folder


def counts(llm: Any) -> dict[str, int]:
    """Drafts that an engine has verified and accepted, and how often it has preempted a request."""
    names = {
        "vllm:spec_decode_num_draft_tokens": "drafts",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:num_preemptions": "preemptions",
    }
    return {names[metric.name]: int(metric.value) for metric in llm.get_metrics() if metric.name in names}


def draft_passes(llm: Any) -> dict[str, int]:
    """Passes of a draft model in the second model runner since the last call: by CUDA graphs, and launched one operator
    after the other.
    """
    [worker] = llm.collective_rpc(lambda worker: worker)
    drafter = worker.model_runner.speculator
    if "passes" not in vars(drafter):
        drafter.passes = Counter()

        def counting(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                drafter.passes[kind] += 1
                return run(*args)

            return counted

        for manager in (drafter.prefill_cudagraph_manager, drafter.decode_cudagraph_manager):
            manager.run_fullgraph = counting("graphs", manager.run_fullgraph)
        drafter._run_model = counting("launched", drafter._run_model)
    passes = dict(drafter.passes)
    drafter.passes.clear()
    return passes


def proposals(llm: Any) -> list[list[int]]:
    """What a drafter in the second model runner has proposed since the last call: of each request of a step the tokens
    that it has, and the drafts; in ascending order.
    """
    [worker] = llm.collective_rpc(lambda worker: worker)
    drafter = worker.model_runner.speculator
    if "proposed" not in vars(drafter):
        drafter.proposed, propose = [], drafter.propose

        def recorded(input_batch: Any, *args: Any, **named: Any) -> torch.Tensor:
            drafts = propose(input_batch, *args, **named)
            lengths = input_batch.seq_lens[: input_batch.num_reqs, None]
            drafter.proposed += torch.cat([lengths, drafts[: len(lengths)]], 1).tolist()
            return drafts

        drafter.propose = recorded
    found = sorted(drafter.proposed)
    drafter.proposed.clear()
    return found


RULES = {"first": ("vllm.v1.sample", "forward"), "second": ("vllm.v1.worker.gpu.spec_decode", "__call__")}
"""Of each model runner, the package whose module ``rejection_sampler`` has vLLM's rule, and its method."""


def first_proposals(llm: Any) -> list[list[list[int]]]:
    """What a drafter in the first model runner has proposed since the last call, [steps, requests, drafts]."""
    [worker] = llm.collective_rpc(lambda worker: worker)
    drafter = worker.model_runner.drafter
    if "proposed" not in vars(drafter):
        drafter.proposed, propose = [], drafter.propose

        def recorded(*args: Any, **named: Any) -> torch.Tensor:
            drafts = propose(*args, **named)
            drafter.proposed.append(drafts.tolist())
            return drafts

        drafter.propose = recorded
    found = list(drafter.proposed)
    drafter.proposed.clear()
    return found


def see_no_later_tokens(llm: Any) -> None:
    """Have the tokens of a draft model of DFlash see none after them."""
    [worker] = llm.collective_rpc(lambda worker: worker)
    for layer in worker.model_runner.drafter.model.modules():
        if getattr(layer, "impl", None) is not None:
            layer.impl.spec = replace(layer.impl.spec, causal=True)


def accept_as_vllm_does(llm: Any, runner: str) -> None:
    """Put back vLLM's own rule, by which a draft is accepted with its probability, in every worker."""
    llm.collective_rpc(partial(_accept_as_vllm_does, runner=runner))


def _accept_as_vllm_does(_worker: Any, runner: str) -> None:
    package, method = RULES[runner]
    module = import_module(f"{package}.rejection_sampler")
    assert module.__spec__
    assert module.__spec__.loader
    fresh = module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(fresh)
    theirs = getattr(fresh.RejectionSampler, method)
    # With the module's own names, among which vLLM has put functions for this device.
    own = FunctionType(theirs.__code__, vars(module), theirs.__name__, theirs.__defaults__)
    setattr(module.RejectionSampler, method, own)
