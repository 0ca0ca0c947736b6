"""OpenRLHF's examples: flags over the defaults of its parser, as it makes a vLLM engine of them."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from .examples import Configuration, Mirror, Unread, check_known, exported, known_model, parsed
from .shell import Unreadable, launched, read

NAME = "OpenRLHF"
PROGRAM = "openrlhf.cli.train_ppo_ray"
_EXTENSION = "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"


def configurations(mirror: Mirror) -> Iterator[Configuration]:
    """Of each script in ``examples`` that makes rollouts."""
    options = _options(mirror.text(f"{PROGRAM.replace('.', '/')}.py"))
    for path in mirror.paths("examples/", ".sh"):
        found = Configuration(path)
        try:
            text = mirror.text(path)
            if PROGRAM not in text:
                continue
            script = read(text)
            commands = launched(script, [PROGRAM])
            if not commands:
                raise Unread("the trainer's flags are not words of a command")
            found.variables = exported(script)
            _fill(found, _flags(commands[-1][1:], options))
        except (Unread, Unreadable) as error:
            found.unread = str(error)
        yield found


def _options(source: str) -> dict[str, tuple[Any, bool]]:
    """Name of an option -> its default, and whether it takes no value."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        is_option = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        if is_option and node.args and isinstance(node.args[0], ast.Constant):
            named = {word.arg: word.value for word in node.keywords}
            is_switch = "action" in named
            default = named.get("default")
            value = ast.literal_eval(default) if isinstance(default, ast.Constant) else None
            found[str(node.args[0].value)] = (is_switch and bool(value) if is_switch else value, is_switch)
    return found


def _flags(words: Sequence[str], options: dict[str, tuple[Any, bool]]) -> dict[str, Any]:
    found = {name.removeprefix("--"): default for name, (default, _) in options.items()}
    for number, word in enumerate(words):
        if word in options:
            following = words[number + 1] if number + 1 < len(words) else ""
            found[word.removeprefix("--")] = True if options[word][1] else parsed(following)
    return found


def _fill(found: Configuration, flags: dict[str, Any]) -> None:
    found.model = known_model(flags["actor.model_name_or_path"])
    if not flags["vllm.num_engines"]:
        raise Unread("it makes no vLLM engine")
    size = flags["vllm.tensor_parallel_size"]
    arguments = {
        "enforce_eager": flags["vllm.enforce_eager"],
        "worker_extension_cls": _EXTENSION,
        "tensor_parallel_size": size,
        "seed": flags["train.seed"],
        "distributed_executor_backend": "uni" if size == 1 else "ray",
        "max_model_len": flags["data.max_len"],
        "enable_prefix_caching": flags["vllm.enable_prefix_caching"],
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "gpu_memory_utilization": flags["vllm.gpu_memory_utilization"],
        # It switches sleep off where nothing is colocated, and refuses it beside asynchronous training.
        "enable_sleep_mode": bool(flags["vllm.enable_sleep"] and flags["train.colocate_all"]),
    }
    if flags["data.max_images_per_prompt"]:
        arguments["limit_mm_per_prompt"] = {"image": flags["data.max_images_per_prompt"]}
    if flags["algo.advantage.is_correction_enable"]:
        arguments |= {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
    check_known(arguments)
    found.arguments = arguments
