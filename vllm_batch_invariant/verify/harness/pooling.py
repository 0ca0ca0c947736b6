"""Requests for models that pool: what a request may ask of an engine and of a server, and what either gives."""

import base64
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..answers import GENERATE, Answer
from ..outcome import NoTestError

if TYPE_CHECKING:
    import torch

    from ..answers import RequestSpec

KINDS = ("embed", "classify", "token_embed", "token_classify")
"""What a request may ask of an engine: vLLM's pooling tasks."""
QUERY = "Which order of additions has a batch?"
"""What every text is scored against."""
SHARES = (0.02, 0.25, 0.5, 1.0)
"""Parts of an embedding that a request may ask for."""
DIMENSIONS, ACTIVATION, TRUNCATED, ENCODING = (
    *("dimensions", "use_activation", "truncate_prompt_tokens", "encoding_format"),
)


@dataclass(frozen=True)
class Task:
    """What a server of a pooling model may be asked.

    Attributes:
        path: of the server.
        body: the fields that hold a prompt, or several; of a score also what these are scored against.
        read: the answer in what the server returns.
        engine: the member of ``KINDS`` that an engine is asked for; empty if a server makes the answer of several.
        takes: names of parameters.
    """

    path: str
    body: Callable[..., dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Answer]
    engine: str
    takes: tuple[str, ...]


def _embedding(data: Mapping[str, Any]) -> Answer:
    raw = base64.b64decode(data["data"][0]["embedding"])
    return Answer.of_values(raw, "float32", [len(raw) // 4])


def _numbers(values: Iterable[float]) -> Answer:
    """Numbers of JSON, which vLLM prints with all the digits of their bits."""
    given = list(values)
    return Answer.of_values(struct.pack(f"<{len(given)}d", *given), "float64", [len(given)])


TASKS = {
    "embed": Task(
        "/v1/embeddings",
        lambda text: {"input": text},
        _embedding,
        "embed",
        (DIMENSIONS, ACTIVATION, TRUNCATED, ENCODING),
    ),
    "score": Task(
        "/score",
        lambda text, query=QUERY: {"text_1": query, "text_2": text},
        lambda data: _numbers([data["data"][0]["score"]]),
        "",
        (ACTIVATION, TRUNCATED),
    ),
    "classify": Task(
        "/classify",
        lambda text: {"input": text},
        lambda data: _numbers(data["data"][0]["probs"]),
        "classify",
        (ACTIVATION, TRUNCATED),
    ),
}
"""By the name in ``reproduce --task``."""


def body_of(spec: "RequestSpec", model: str) -> dict[str, Any]:
    """The target request for a server. An embedding is sent as its bytes."""
    asked = params_of(spec.task, spec.dimensions, spec.activation)
    if spec.truncate is not None:
        asked[TRUNCATED] = spec.truncate
    return TASKS[spec.task].body(spec.prompt) | {"model": model} | asked


def params_of(task: str, dimensions: int | None, activation: bool | None) -> dict[str, Any]:
    """Fields of a request to a server that say what it wants beside a prompt; an embedding comes as its bytes."""
    params = {DIMENSIONS: dimensions, ACTIVATION: activation, ENCODING: "base64"}
    return {name: value for name, value in params.items() if value is not None and name in TASKS[task].takes}


def answer_in(task: str, data: Mapping[str, Any]) -> Answer:
    """The answer in what a server returned.

    Raises:
        NoTestError: it is none of this task.
    """
    try:
        return TASKS[task].read(data)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        what = f"what the server returned at {TASKS[task].path} is no answer"
        raise NoTestError(f"{what}: {type(error).__name__}: {error}") from error


def draw(chance: random.Random, takes: Iterable[str], longest: int) -> dict[str, Any]:
    """Parameters of a concurrent request, each left out at times.

    Args:
        chance: the source of every choice.
        takes: the parameters that there are.
        longest: most tokens of a prompt.

    Returns:
        With ``dimensions`` as a part of all, a member of ``SHARES``.
    """
    values: dict[str, tuple[Any, ...]] = {
        DIMENSIONS: SHARES,
        ACTIVATION: (True, False),
        TRUNCATED: tuple(length for length in (1, 3, 17, 64, 300) if length <= longest) or (1,),
        ENCODING: ("float", "base64"),
    }
    return {name: chance.choice(values[name]) for name in takes if chance.random() < 0.5}


def wanted(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All that may be asked of an engine about a prompt, as arguments of vLLM's ``PoolingParams``: each task, with and
    without its activation, and embeddings of fewer dimensions.

    Args:
        about: the engine, see :func:`about`.

    Raises:
        NoTestError: it has no task of ``KINDS``.
    """
    if not about["tasks"]:
        raise NoTestError(f"the model pools, and has none of the tasks that are compared: {', '.join(KINDS)}")
    found: list[dict[str, Any]] = []
    for task in about["tasks"]:
        found += [{"task": task}, {"task": task, ACTIVATION: False}]
        if task.endswith("embed"):
            found += [{"task": task, DIMENSIONS: some} for some in about["dimensions"][:1]]
    return found


def draw_of_engine(chance: random.Random, about: Mapping[str, Any], task: str = "") -> dict[str, Any]:
    """Parameters of a request to an engine, of any task if none is given."""
    task = task or chance.choice(about["tasks"])
    params: dict[str, Any] = {"task": task}
    if chance.random() < 0.5:
        params[ACTIVATION] = chance.random() < 0.5
    if about["dimensions"] and task.endswith("embed") and chance.random() < 0.5:
        params[DIMENSIONS] = chance.choice(about["dimensions"])
    return params


def varied(asked: Iterable[Mapping[str, Any]]) -> str:
    """The parameters of several requests in words."""
    seen: dict[str, set[str]] = {}
    for params in asked:
        for name, value in params.items():
            seen.setdefault(name, set()).add(str(value))
    return ", ".join(f"{name} {'/'.join(sorted(seen[name]))}" for name in sorted(seen)) or "no parameters"


def described(data: "torch.Tensor") -> dict[str, Any]:
    """What an engine gave, as plain data that :func:`..answers.answer_of` reads."""
    import torch

    values = data.detach().cpu().contiguous()
    raw = values.reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    return {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape), "raw": raw}


ASK = f"a model that pools is asked by --task {', '.join(TASKS)}"
"""What to do where a command asks for text."""
HOW = f"reproduce --task {', '.join(TASKS)} and check MODEL compare what a model gives that pools"
"""What to do with a command that takes none."""
HINT = f"the model may have another --task, of {', '.join((GENERATE, *TASKS))}"
"""What to do where a server has no such route."""


def require(about: Mapping[str, Any], task: str, what: str) -> None:
    """Refuse an engine that pools where text is asked for, and one that generates or pools otherwise where it is not.

    Args:
        about: the engine, see :func:`about`.
        task: :data:`..answers.GENERATE`, or a key of ``TASKS``.
        what: a command is of, if it asks for text.

    Raises:
        NoTestError: it is so.
    """
    if task == GENERATE and about:
        raise NoTestError(f"the model pools ({', '.join(about['tasks'])}) and gives no {what}: {ASK}")
    if task != GENERATE and not about:
        raise NoTestError(f"the engine generates: --task {task} needs --serve-args='--runner pooling'")
    if (wanted := TASKS[task].engine if task != GENERATE else "") and wanted not in about["tasks"]:
        raise NoTestError(f"the model has no task {wanted}: it has {', '.join(about['tasks']) or 'none that is asked'}")


def about(llm: Any) -> dict[str, Any]:
    """What requests depend on of an engine that pools; empty for one that generates.

    Returns:
        ``tasks`` (members of ``KINDS``), ``attention`` ("encoder_only" or "decoder"), ``by`` (how rows of a prompt are
        pooled), ``size`` of an embedding, and ``dimensions`` that a request may ask for.
    """
    model = llm.llm_engine.vllm_config.model_config
    if model.runner_type != "pooling":
        return {}
    tasks = [task for task in KINDS if task in llm.llm_engine.get_supported_tasks()]
    size = model.embedding_size
    given = getattr(model, "matryoshka_dimensions", None)
    shares = sorted({max(1, round(share * size)) for share in SHARES})
    pooler = model.pooler_config
    return {
        "tasks": tasks,
        "attention": model.attn_type,
        "by": str(getattr(pooler, "seq_pooling_type", None) or getattr(pooler, "pooling_type", None)),
        "size": size,
        "dimensions": list(given or shares) if model.is_matryoshka else [],
    }
