"""TRL's examples: commands in their docstrings, and the configuration that their code makes."""

import ast
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from .examples import Configuration, Mirror, Unread, check_known, defaults, known_model, parsed

NAME = "TRL"
_GENERATION, _SERVER, _GRPO = (
    "trl/generation/vllm_generation.py",
    "trl/scripts/vllm_serve.py",
    "trl/trainer/grpo_config.py",
)
_OF_THE_FRONT_END = (
    *("host", "port", "return_tokens_as_token_ids", "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
    "chat_template",
)
"""Options of ``vllm serve`` that no engine has."""
_MODELS = ("model_name_or_path", "model", "model_id", "model_name")


def configurations(mirror: Mirror) -> Iterator[Configuration]:
    """Of each script and notebook in ``examples`` that uses vLLM: a server, and an engine in its process."""
    own, server = defaults(mirror.text(_GRPO), "GRPOConfig"), defaults(mirror.text(_SERVER), "ScriptArguments")
    for path in mirror.paths("examples/", ".py", ".ipynb"):
        try:
            source = _source(mirror.text(path), path)
            if "vllm" not in source:
                continue
            yield from _of_script(path, source, own, server)
        except (Unread, SyntaxError) as error:
            yield Configuration(path, unread=str(error))


def _source(text: str, path: str) -> str:
    if not path.endswith(".ipynb"):
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    return "\n".join("pass" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def _of_script(path: str, source: str, own: dict[str, Any], server: dict[str, Any]) -> Iterator[Configuration]:
    tree = ast.parse(source)
    commands = list(_commands(ast.get_docstring(tree) or ""))
    code = _Code(tree)
    seen = list[tuple[str, dict[str, Any]]]()
    found: Configuration | None
    for words in commands:
        if "vllm-serve" in words or words[:2] == ["vllm", "serve"]:
            found = _server(path, words, server)
        elif any(word.endswith(path.rpartition("/")[2]) for word in words):
            found = _engine(path, code, _flags(words), own)
        else:
            continue
        if found and (found.model, found.arguments) not in seen:
            seen.append((found.model, found.arguments))
            yield found
    if not seen:
        found = _engine(path, code, {}, own)
        if found:
            yield found


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if re.match(r"\s*([A-Z_]+=\S+ )*(python|accelerate|trl|vllm|uv) ", line):
            words = shlex.split(line, comments=True)
            while re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            yield words


def _flags(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, word in enumerate(words):
        if word.startswith("--"):
            following = words[number + 1] if number + 1 < len(words) else "--"
            name, sign, text = word.removeprefix("--").partition("=")
            if not sign and following.startswith("--"):
                found[name.replace("-", "_")] = True
            else:
                found[name.replace("-", "_")] = parsed(text if sign else following)
    return found


def _server(path: str, words: list[str], base: dict[str, Any]) -> Configuration:
    flags = _flags(words)
    if words[:2] == ["vllm", "serve"]:
        model = flags.pop("model", None) or words[2]
        arguments = {name: value for name, value in flags.items() if name not in _OF_THE_FRONT_END}
    else:
        given = base | flags
        model = given["model"]
        arguments = {
            "tensor_parallel_size": given["tensor_parallel_size"],
            "gpu_memory_utilization": given["gpu_memory_utilization"],
            "enforce_eager": given["enforce_eager"],
            "dtype": given["dtype"],
            "enable_prefix_caching": given["enable_prefix_caching"],
            "kv_cache_dtype": given["kv_cache_dtype"],
            "max_model_len": given["max_model_len"],
            "worker_extension_cls": "trl.scripts.vllm_serve.WeightSyncWorkerExtension",
            "trust_remote_code": given["trust_remote_code"],
            "model_impl": given["vllm_model_impl"],
            "distributed_executor_backend": given["distributed_executor_backend"],
            "logprobs_mode": "processed_logprobs",
            "speculative_config": given["speculative_config"],
        }
        if given["data_parallel_size"] != 1:
            arguments["data_parallel_size"] = given["data_parallel_size"]
    found = Configuration(f"{path} (server)", known_model(model))
    found.arguments = {name: value for name, value in arguments.items() if value is not None}
    return found


def _engine(path: str, code: "_Code", flags: dict[str, Any], own: dict[str, Any]) -> Configuration | None:
    """The engine in the trainer's process; None if it has none."""
    given = own | code.configuration(flags) | {name: value for name, value in flags.items() if name in own}
    if not given["use_vllm"] or given["vllm_mode"] == "server":
        return None
    found = Configuration(path)
    try:
        found.model = known_model(code.model(flags))
        arguments = {
            "tensor_parallel_size": given["vllm_tensor_parallel_size"],
            "gpu_memory_utilization": given["vllm_gpu_memory_utilization"],
            "max_model_len": given["vllm_max_model_length"],
            "enable_sleep_mode": given["vllm_enable_sleep_mode"],
            "model_impl": given["vllm_model_impl"],
            "distributed_executor_backend": "external_launcher",
            "max_num_batched_tokens": 4096,
            "logprobs_mode": "processed_logprobs",
            "quantization": "bitsandbytes" if code.has("load_in_4bit") or flags.get("load_in_4bit") else None,
        }
        check_known(arguments)
        found.arguments = {name: value for name, value in arguments.items() if value is not None}
    except Unread as error:
        found.unread = str(error)
    return found


class _Code:
    """What a script's code says of its engine: literals, defaults of its parser, names that stand for one."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._options: dict[str, Any] = {}
        self._names: dict[str, ast.expr] = {}
        for node in self._nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args:
                named = {word.arg: word.value for word in node.keywords}
                name = str(ast.literal_eval(node.args[-1])).removeprefix("--").replace("-", "_")
                default = named.get("default")
                is_switch = isinstance(named.get("action"), ast.Constant)
                self._options[name] = (
                    self._value(default, {}) if default is not None else (False if is_switch else None)
                )
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._names.setdefault(node.targets[0].id, node.value)

    def has(self, name: str) -> bool:
        """Whether the code sets a keyword of this name to True."""
        return any(
            isinstance(node, ast.keyword) and node.arg == name and getattr(node.value, "value", None) is True
            for node in self._nodes
        )

    def configuration(self, flags: dict[str, Any]) -> dict[str, Any]:
        """The keywords of the trainer's configuration that are about vLLM."""
        found: dict[str, Any] = {}
        for node in self._nodes:
            named = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            for word in node.keywords if re.search(r"Config$|^dict$", named) else ():
                name, value = word.arg, word.value
                if name and "vllm" in name:
                    found[name] = self._value(value, flags)
        return found

    def model(self, flags: dict[str, Any]) -> Any:
        """The model's name."""
        for name in _MODELS:
            if flags.get(name):
                return flags[name]
        for node in self._nodes:
            if isinstance(node, ast.Call) and re.search(r"Trainer$", getattr(node.func, "id", "")):
                for word in node.keywords:
                    if word.arg == "model":
                        return self._value(word.value, flags)
        return None

    def _value(self, node: ast.expr, flags: dict[str, Any], depth: int = 0) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Attribute(value=ast.Name(id="args"), attr=name):
                return flags.get(name, self._options.get(name))
            case ast.Name(id=name) if name in self._names and depth < 5:
                return self._value(self._names[name], flags, depth + 1)
            case ast.BoolOp(op=ast.Or(), values=[first, *_]):
                return self._value(first, flags, depth)
            case ast.IfExp(body=body):
                return self._value(body, flags, depth)
            case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
                return self._value(first, flags, depth)
        return None
