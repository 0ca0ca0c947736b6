"""A checkpoint whose answers no rounding changes: plain vLLM and ours write the same text, so that drafts are accepted
alike and a token's time can be compared.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.engine_workloads import SPECIAL

CYCLE = 32
"""Tokens that follow each other, and then begin again: n-grams are wrong about the first cycle and right afterwards."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDED = 100.0
"""Size of an element: what the layers add is small beside it."""
_FOLLOWS = 12.0
"""Logit of the token that follows; those of the others are about normal, so that a logprob is neither 0 nor far off."""


def follows(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The token that follows each: the next one of its cycle. Special tokens follow themselves.

    Args:
        tokens: int64, ids.
        vocabulary: how many ids there are.
    """
    first = tokens - (tokens - SPECIAL) % CYCLE
    last = torch.clamp(first + CYCLE, max=vocabulary) - 1
    found = torch.where(tokens == last, first, tokens + 1)
    return torch.where(tokens < SPECIAL, tokens, found)


def make_predictable(model: Path, folder: Path) -> Path:
    """Write a checkpoint with the layers of ``model``, an embedding and a head of its own; returns ``folder``.

    Args:
        model: a checkpoint whose head is not its embedding. Files that have neither are linked to.
        folder: to write.

    Raises:
        ValueError: the head is the embedding, or there is none.
    """
    config = json.loads((model / "config.json").read_text())
    names = {path: list(safe_open(path, "pt").keys()) for path in sorted(model.glob("*.safetensors"))}
    found = {name for of_file in names.values() for name in of_file}
    if config.get("tie_word_embeddings") or not {_EMBEDDING, _HEAD} <= found:
        raise ValueError(f"{model} has no {_EMBEDDING} and {_HEAD} of its own")
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.Generator(device).manual_seed(0)
    embedding, noise = (torch.randn(vocabulary, hidden, generator=drawn, device=device) for _ in range(2))
    head = torch.zeros_like(embedding)
    tokens = torch.arange(SPECIAL, vocabulary, device=device)
    head[follows(tokens, vocabulary)] = (embedding * (_FOLLOWS / hidden) + noise * hidden**-0.5)[SPECIAL:]
    made = {_EMBEDDING: embedding * _EMBEDDED, _HEAD: head}
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if made.keys().isdisjoint(names.get(path, [])):
            (folder / path.name).symlink_to(path.resolve())
        else:
            weights = load_file(path)
            weights |= {name: made[name].to(weights[name]) for name in made if name in weights}
            save_file(weights, folder / path.name, metadata={"format": "pt"})
    del embedding, noise, head, made
    torch.cuda.empty_cache()  # engines need what this process would keep
    return folder
