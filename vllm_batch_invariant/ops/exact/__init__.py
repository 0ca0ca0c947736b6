"""Exact arithmetic: operations whose sums are sums of integers, so that every machine gives them the same bits."""

FORMAT = "X16.1"
"""The name of what :mod:`.definition` says. Another definition has another name."""

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Models all of whose operations are defined, by the name of their class."""
WITH_WINDOWS = ("LlamaForCausalLM", "MistralForCausalLM")
"""Those of them all of whose layers have the window that a configuration names."""
ROTARY_EMBEDDINGS = ("default", "llama3")
"""Types of rotary embeddings that are defined, as configurations call them."""

__all__ = ["FORMAT", "MODELS", "ROTARY_EMBEDDINGS", "WITH_WINDOWS"]
