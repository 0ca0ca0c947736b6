"""Drafters: one for vLLM's method ``custom_class`` that knows the answers, and a draft head."""

import json
import os
import random
from importlib.util import module_from_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

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


def make_eagle3_head(target: Path, folder: Path) -> Path:
    """Write a draft head of EAGLE-3's shape with random weights, for the target in a folder."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocabulary, heads, kv_heads, size = of_target["hidden_size"], of_target["vocab_size"], 8, 2, 64
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "max_position_embeddings": of_target["max_position_embeddings"],
        "torch_dtype": "bfloat16",
    }
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.mlp.gate_proj": (hidden, hidden),
        "midlayer.mlp.up_proj": (hidden, hidden),
        "midlayer.mlp.down_proj": (hidden, hidden),
        "norm": (hidden,),
        "lm_head": (vocabulary, hidden),
    }
    chance = torch.Generator().manual_seed(5)
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=chance) / hidden**0.5
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def counts(llm: Any) -> dict[str, int]:
    """Drafts that an engine has verified and accepted, and how often it has preempted a request."""
    names = {
        "vllm:spec_decode_num_draft_tokens": "drafts",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:num_preemptions": "preemptions",
    }
    return {names[metric.name]: int(metric.value) for metric in llm.get_metrics() if metric.name in names}


def accept_as_vllm_does(_llm: Any) -> None:
    """Put back vLLM's own rule, by which a draft is accepted with its probability."""
    from vllm.v1.sample import rejection_sampler

    assert rejection_sampler.__spec__
    assert rejection_sampler.__spec__.loader
    fresh = module_from_spec(rejection_sampler.__spec__)
    rejection_sampler.__spec__.loader.exec_module(fresh)
    theirs = fresh.RejectionSampler.forward.__code__
    # With the module's own names, among which vLLM has put functions for this device.
    rejection_sampler.RejectionSampler.forward = FunctionType(theirs, vars(rejection_sampler), theirs.co_name)
