"""Whether the mode knows every layer of a class of vLLM's."""

import inspect
import sys

import pytest
import torch

from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.layers import review


def check_layers(architecture: str) -> None:
    """Fail if the check of a model that is loaded would refuse a layer of a class that the registry names."""
    registry = pytest.importorskip("vllm.model_executor.models.registry").ModelRegistry
    if architecture in RAN.encoded:
        pytest.importorskip("torchvision", reason="engines of test_images.py know them")
    model = registry.models[architecture].load_model_cls()
    file = sys.modules[model.__module__]
    if ".transformers" in file.__name__:  # that file has the classes of all models that Transformers computes
        assert review._is_known(model) or review.of_model_class(model) is None
        return
    kinds = [kind for kind in vars(file).values() if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)]
    own = [kind for kind in kinds if kind.__module__ == file.__name__ and not review._is_known(kind)]
    own = [kind for kind in own if "Indexer" not in kind.__name__]  # of DeepSeek-V3.2, which is refused
    assert own
    assert {kind.__name__: said for kind in own if (said := review.of_model_class(kind))} == {}
