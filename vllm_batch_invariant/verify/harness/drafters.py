"""Draft models of random weights, for a model in a folder."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import dflash, gemma4_drafter
from .engine import text_config

_WRITERS: dict[str, Callable[[Path, Mapping[str, Any]], Path]] = {
    "dflash": dflash.write,
    "mtp": gemma4_drafter.write,
}
"""By vLLM's method."""


def beside(model: str, method: str) -> dict[str, str]:
    """What ``--speculative-config`` says of a draft model of a method, for a model in a folder: its own folder, which
    is written once and stays: a line for a shell names it. Nothing where a model brings its layers for more tokens.
    """
    if method not in _WRITERS:
        return {}
    config = text_config(model)
    if method == "mtp" and config.get("model_type") not in gemma4_drafter.TEXTS:
        return {}
    digest = sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"vllm-batch-invariant-{method}-{os.getuid()}-{digest}"
    if config and not folder.exists():
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as made:
            try:
                _WRITERS[method](Path(made) / "model", config).rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return {"model": str(folder)}
