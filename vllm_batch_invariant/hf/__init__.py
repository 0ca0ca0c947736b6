"""A Hugging Face model whose logprobs have the bits of the engine's, with gradients: rollout and trainer agree exactly.

    model = patch(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    check_engine(model, llm.collective_rpc("batch_invariant_declaration"))
    logits = model(tokens, attention_mask=mask).logits
    logprobs = token_logprobs(logits[:, :-1], tokens[:, 1:])

Most modules are one operation each, as the engine computes it in the forward pass, with its gradient.
"""

from .fp8 import engine_weights
from .logprobs import Sampling, token_logprobs
from .patching import patch
from .rollout import check_engine

__all__ = ["Sampling", "check_engine", "engine_weights", "patch", "token_logprobs"]
