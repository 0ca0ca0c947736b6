"""The fingerprint of a server: what is in it, and where it is put."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from vllm_batch_invariant.integration.engine import endpoint, server, weights
from vllm_batch_invariant.integration.engine.server import Endpoint, Fingerprint, Metric, stamp
from vllm_batch_invariant.integration.reviews import patch_points

ENVIRONMENT = {
    "mode": True,
    "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
    "device": {"type": "cpu", "name": "Xeon", "threads": 2},
    "engine": {"dtype": "bfloat16"},
    "reductions": {"attention": {"implementation": "numba", "split_size": 256}},
}


@dataclass
class StructuredOutputs:
    backend: str = "auto"


@dataclass
class Reasoning:
    reasoning_end_str: str = "</think>"


def tokenizer() -> Any:
    rust = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return SimpleNamespace(
        backend_tokenizer=rust, chat_template="{{ messages }}", special_tokens_map={"eos_token": "b"}
    )


class Configuration:
    def __init__(self) -> None:
        self.values = {"rope_theta": 1e4, "_name_or_path": "/one/folder", "transformers_version": "5.5"}

    def to_dict(self) -> dict[str, Any]:
        return self.values


@dataclass
class Given:
    """What a fingerprint is made of, to be changed by a test."""

    environment: dict[str, Any]
    engine: Any
    args: Any
    weights: str = "w"

    @classmethod
    def usual(cls) -> "Given":
        held, defaults, generation = tokenizer(), {"temperature": 0.6}, {"eos_token_id": 1, "transformers_version": "5"}
        model = SimpleNamespace(
            hf_config=Configuration(),
            architecture="Qwen3ForCausalLM",
            get_diff_sampling_param=lambda: defaults,
            try_get_generation_config=lambda: generation,
        )
        engine = SimpleNamespace(
            model_config=model,
            vllm_config=SimpleNamespace(structured_outputs_config=StructuredOutputs(), reasoning_config=Reasoning()),
            get_tokenizer=lambda: held,
            defaults=defaults,
            generation=generation,
        )
        args = SimpleNamespace(chat_template=None, tool_call_parser=None, max_num_seqs=64, port=8000)
        return cls(
            {name: dict(part) if isinstance(part, dict) else part for name, part in ENVIRONMENT.items()}, engine, args
        )

    def __str__(self) -> str:
        return str(Fingerprint.of(self.environment, self.engine, self.args, self.weights))


class Processor:
    def __init__(self) -> None:
        self.fields = {"size": {"longest_edge": 784}, "of": object()}

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def seeing() -> Given:
    """Of a model that sees images."""
    given, processor = Given.usual(), Processor()
    model = given.engine.model_config
    model.architecture, model.is_multimodal_model = "Qwen2_5_VLForConditionalGeneration", True
    model.multimodal_config = SimpleNamespace(
        get_limit_per_prompt=lambda kind: 1, mm_processor_kwargs=None, media_io_kwargs={}, mm_processor_cache_gb=4
    )
    info = SimpleNamespace(get_hf_processor=lambda: processor)
    given.engine.renderer = SimpleNamespace(get_mm_processor=lambda: SimpleNamespace(info=info))
    given.engine.processor = processor
    return given


OF_ITEMS: dict[str, tuple[bool, Callable[[Given], Any]]] = {
    "nothing": (False, lambda given: None),
    "cache": (False, lambda given: vars(given.engine.model_config.multimodal_config).update(mm_processor_cache_gb=0)),
    "processor": (True, lambda given: given.engine.processor.fields.update(size={"longest_edge": 392})),
    "arguments of the processor": (
        True,
        lambda given: vars(given.engine.model_config.multimodal_config).update(mm_processor_kwargs={"max_pixels": 784}),
    ),
    "frames": (
        True,
        lambda given: given.engine.model_config.multimodal_config.media_io_kwargs.update(video={"num_frames": 4}),
    ),
}
"""Whether it decides what is encoded, and the change."""

Change = Callable[[Given], Any]
DECIDING: dict[str, Change] = {
    "weights": lambda given: setattr(given, "weights", "v"),
    "version": lambda given: given.environment["versions"].update(torch="2.13.1"),
    "threads": lambda given: given.environment["device"].update(threads=4),
    "kind of machine": lambda given: given.environment["device"].update(name="EPYC"),
    "dtype": lambda given: given.environment["engine"].update(dtype="float16"),
    "reduction": lambda given: given.environment["reductions"].update(norm={"lanes": 64}),
    "configuration": lambda given: given.engine.model_config.hf_config.values.update(rope_theta=1e6),
    "class": lambda given: setattr(given.engine.model_config, "architecture", "TransformersForCausalLM"),
    "vocabulary": lambda given: given.engine.get_tokenizer().backend_tokenizer.add_tokens(["c"]),
    "template of the tokenizer": lambda given: setattr(given.engine.get_tokenizer(), "chat_template", "{{ other }}"),
    "template of the server": lambda given: setattr(given.args, "chat_template", "{{ another }}"),
    "default sampling": lambda given: given.engine.defaults.update(top_p=0.9),
    "tools": lambda given: setattr(given.args, "tool_call_parser", "hermes"),
    "grammars": lambda given: setattr(given.engine.vllm_config.structured_outputs_config, "backend", "guidance"),
    "no tokenizer": lambda given: setattr(given.engine, "get_tokenizer", absent),
    "end of thoughts": lambda given: setattr(
        given.engine.vllm_config.reasoning_config, "reasoning_end_str", "So:</think>"
    ),
    "no thoughts": lambda given: setattr(given.engine.vllm_config, "reasoning_config", None),
    "efforts": lambda given: setattr(given.args, "reasoning_effort_map", {"medium": "low"}),
    "effort of no thoughts": lambda given: setattr(given.args, "anthropic_disabled_thinking_effort", "low"),
    "prompt format": lambda given: setattr(given.args, "cohere_format", "cmd3"),
    "tools of the server": lambda given: setattr(given.args, "tool_server", "demo"),
    "end of answers": lambda given: given.engine.generation.update(eos_token_id=[1, 2]),
}
FREE: dict[str, Change] = {
    "nothing": lambda given: None,
    "requests of a step": lambda given: setattr(given.args, "max_num_seqs", 7),
    "port": lambda given: setattr(given.args, "port", 8001),
    "version that wrote a configuration": lambda given: given.engine.generation.update(transformers_version="6"),
    "folder": lambda given: given.engine.model_config.hf_config.values.update(_name_or_path="/another"),
    "what a request cut": lambda given: given.engine.get_tokenizer().backend_tokenizer.enable_truncation(9),
}


def absent() -> None:
    raise ValueError("no tokenizer")


@pytest.fixture(autouse=True)
def nothing_published(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of weights that an engine has published; none yet."""
    found: list[str] = []
    monkeypatch.setattr(weights, "published", lambda: found[-1] if found else None)
    return found


@pytest.mark.parametrize("name", OF_ITEMS)
def test_what_is_made_of_an_image_changes_the_fingerprint(name: str) -> None:
    decides, change = OF_ITEMS[name]
    given = seeing()
    change(given)
    assert (str(given) != str(seeing())) is decides


def test_how_videos_are_decoded_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = str(seeing()), str(Given.usual())
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "pyav")
    assert str(seeing()) != before[0]
    assert str(Given.usual()) == before[1]


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_bits_or_tokens_changes_the_fingerprint(name: str) -> None:
    given = Given.usual()
    DECIDING[name](given)
    assert str(given) != str(Given.usual())


def test_the_seed_of_requests_without_one_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_SEED", "5")
    five = str(Given.usual())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_SEED", "6")
    assert str(Given.usual()) != five


@pytest.mark.parametrize("name", server.REQUEST_VARIABLES)
def test_a_variable_that_makes_prompts_or_grammars_changes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    without = str(Given.usual())
    monkeypatch.setenv(name, "0")
    assert str(Given.usual()) != without


@pytest.mark.parametrize("name", server.REQUEST_LIBRARIES)
def test_a_library_that_makes_tokens_or_masks_changes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = str(Given.usual())
    known = server.installed
    monkeypatch.setattr(server, "installed", lambda package: "999" if package == name else known(package))
    assert str(Given.usual()) != usual


@pytest.mark.parametrize("name", server.FILE_ARGUMENTS)
def test_what_a_plugins_file_says_changes_it(name: str, tmp_path: Any) -> None:
    file, said = tmp_path / "plugin.py", set()
    for text in ("a", "b", "a"):
        file.write_text(text)
        given = Given.usual()
        setattr(given.args, name, str(file))
        said.add(str(given))
    assert len(said) == 2


READ = """host port grpc_port uds uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints
    allow_credentials allowed_origins allowed_methods allowed_headers api_key ssl_keyfile ssl_certfile ssl_ca_certs
    enable_ssl_refresh ssl_cert_reqs ssl_ciphers root_path middleware enable_request_id_headers disable_fastapi_docs
    enable_offline_docs h11_max_incomplete_event_size h11_max_header_count log_config_file data_parallel_supervisor_port
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold
    max_log_len enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking
    enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint enable_log_outputs
    enable_log_deltas log_error_stack tokens_only enable_scale_out fingerprint_mode fingerprint_value
    response_role return_tokens_as_token_ids cohere_is_reasoning_model
    lora_modules trust_request_mm_kwargs enable_flash_late_interaction"""
"""Arguments of vLLM's servers that decide no token of a covered model: how a server is reached, what it logs and
counts, how it shows what a model said; adapters, images and pooling, which are refused.
"""


def test_every_argument_of_vllms_server_is_in_it_or_decides_no_token() -> None:
    pytest.importorskip("vllm")
    module = patch_points.PatchPoint(
        ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
        "FrontendArgs",
    )
    names = {field.name for field in fields(module.get())}
    assert names - {*READ.split(), *server.REQUEST_ARGUMENTS, *server.FILE_ARGUMENTS} == set()


@pytest.mark.parametrize("name", FREE)
def test_what_decides_neither_leaves_it(name: str) -> None:
    given = Given.usual()
    FREE[name](given)
    assert str(given) == str(Given.usual())


def test_a_chat_template_is_the_same_in_a_file_and_in_the_argument(tmp_path: Any) -> None:
    said = set()
    (tmp_path / "template.jinja").write_text("{{ x }}")
    for template in ("{{ x }}", str(tmp_path / "template.jinja")):
        given = Given.usual()
        given.args.chat_template = template
        said.add(str(given))
    assert len(said) == 1


def test_an_engine_that_says_little_of_itself_promises_nothing() -> None:
    given = Given.usual()
    given.environment["reductions"] = {}
    assert str(given) == ""


class Serving:
    """As vLLM's objects that answer: it is given a fingerprint when it is made."""

    def __init__(self, said: str | None) -> None:
        self.system_fingerprint = said


def test_answers_have_the_fingerprint_of_the_weights_that_computed_them(nothing_published: list[str]) -> None:
    given, kind = Given.usual(), type("Serving", (Serving,), {})
    found = Fingerprint.of(given.environment, given.engine, given.args, "w")
    chat, silent = kind("vllm-0.32.0-12345678"), kind(None)
    stamp(SimpleNamespace(_state={"chat": chat, "silent": silent, "number": 1, "nothing": None}), found)
    assert chat.system_fingerprint == str(Given.usual())
    assert silent.system_fingerprint is None  # --fingerprint-mode none
    assert kind("another server's").system_fingerprint == "another server's"
    nothing_published.append("v")
    given.weights = "v"
    assert chat.system_fingerprint == str(given)
    nothing_published.append("w")
    assert chat.system_fingerprint == str(Given.usual())


def test_the_metric_is_one_for_what_is_served_and_zero_for_what_was(nothing_published: list[str]) -> None:
    given = Given.usual()
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="of this test"),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    found = Fingerprint.of(given.environment, given.engine, given.args, "w")
    metric = Metric(given.environment, config)
    first = str(found)
    metric.show(first, "1-a")
    found.tell(lambda fingerprint: metric.show(fingerprint, ""))
    nothing_published.append("v")
    second = str(found)
    metric.show(second, "1-b")
    REGISTRY.unregister(server._made_gauge())  # as vLLM does for the next engine of a process
    metric.show(second, "1-b")
    samples = [sample for family in REGISTRY.collect() if family.name == endpoint.METRIC for sample in family.samples]
    values = {
        (sample.labels["fingerprint"], sample.labels["witness"]): sample.value
        for sample in samples
        if sample.labels["model_name"] == "of this test"
    }
    assert values == {(first, "1-a"): 0, (second, ""): 0, (second, "1-b"): 1}
    assert samples[0].labels["device"] == "Xeon"


@pytest.mark.parametrize("mode", ["full", "hash", "custom", "none"])
def test_a_user_who_chose_the_field_keeps_it_and_the_route_has_the_fingerprint(mode: str) -> None:
    given, kind = Given.usual(), type("Serving", (Serving,), {})

    async def collective_rpc(method: str) -> list[Any]:
        return [{endpoint.METHOD: given.environment, weights.METHOD: "w"}[method]]

    given.args.fingerprint_mode = mode
    given.engine.collective_rpc = collective_rpc
    given.engine.model_config.served_model_name = "of another test"
    given.engine.vllm_config.model_config = given.engine.model_config
    given.engine.vllm_config.device_config = SimpleNamespace(device_type="cpu")
    given.engine.model_config.runner_type = "pooling"
    theirs = None if mode == "none" else "theirs"
    serving, plugin = kind(theirs), Endpoint()

    async def session() -> dict[str, Any]:
        await plugin.init_state(given.engine, SimpleNamespace(_state={"chat": serving}), given.args)
        return await plugin.engine_info()

    found = asyncio.run(session())
    assert found == given.environment | {"fingerprint": str(given), "witness": ""}
    assert serving.system_fingerprint == (theirs if mode in ("custom", "none") else str(given))


def test_an_engine_of_several_workers_tells_what_all_of_them_are() -> None:
    def worker(threads: int, **experts: str) -> dict[str, Any]:
        named = {f"experts {number}": {"scoring": kind} for number, kind in enumerate(experts.values(), 1)}
        return {"mode": True, "device": {"type": "cpu", "threads": threads}, "reductions": {"norm": {"n": 1}} | named}

    alone = worker(4, a="softmax")
    assert endpoint.of_workers([alone]) == endpoint.of_workers([alone, alone]) == alone
    both = endpoint.of_workers([worker(4), worker(2, a="sigmoid"), worker(2, a="sigmoid", b="softmax")])
    assert both == worker(4, a="sigmoid", b="softmax") | {"device": {"type": "cpu", "threads": "4|2|2"}}


@pytest.mark.parametrize(
    ("tasks", "offered"), [(("generate",), 1), (("render",), 0), (("embed", "token_embed"), 1), (None, 0)]
)
def test_every_server_that_generates_or_pools_gets_the_route(
    tasks: tuple[str, ...] | None, offered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points.ENDPOINT_PLUGINS.module(), "load_endpoint_plugins", lambda tasks=None: ["another"])
    server.offer()
    found = patch_points.ENDPOINT_PLUGINS.get()(tasks)
    assert [getattr(plugin, "name", plugin) for plugin in found] == ["another", *[Endpoint.name] * offered]
