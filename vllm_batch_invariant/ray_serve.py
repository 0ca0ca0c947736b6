"""For Ray Serve LLM: the process of a replica that answers has vLLM's plugins, too.

With GPUs Ray makes the configuration of an engine in another process, and of a replica only that one and the engine's
would load them: answers would have no fingerprint, and those that go on would not be checked.
"""

from ray.llm._internal.common.callbacks.base import CallbackBase
from vllm.plugins import load_general_plugins


class LoadPlugins(CallbackBase):
    """``callback_config={"callback_class": "vllm_batch_invariant.ray_serve.LoadPlugins"}`` of Ray's ``LLMConfig``."""

    async def on_before_node_init(self) -> None:
        """Called by Ray before the engine starts."""
        load_general_plugins()
