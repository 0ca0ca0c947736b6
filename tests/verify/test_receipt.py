"""What a receipt holds, what it is closed by, and what two of them say about each other."""

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.server import Page, fake_server
from tests.verify.receipts import CPU, INFO, LOGPROBS, PROMPT, completion, receipt, rewritten
from vllm_batch_invariant import kept_file
from vllm_batch_invariant.integration import devices
from vllm_batch_invariant.integration.engine import endpoint
from vllm_batch_invariant.ops.attention import AttentionReduction
from vllm_batch_invariant.provenance import environment_here
from vllm_batch_invariant.verify.outcome import NoTestError, Status
from vllm_batch_invariant.verify.receipt import (
    Adapter,
    BadReceipt,
    Environment,
    Item,
    Prompt,
    Receipt,
    Sampling,
    Tensor,
    Text,
    compare,
    difference_of_logprobs,
    engine_info,
    first_difference_of,
    make_on_server,
    verify_on_server,
)
from vllm_batch_invariant.verify.receipt.engine import complete, require_adapter
from vllm_batch_invariant.verify.receipt.items import require
from vllm_batch_invariant.verify.receipt.model_files import model_at, public_name
from vllm_batch_invariant.verify.receipt.page import page_of
from vllm_batch_invariant.verify.receipt.recompute import recompute
from vllm_batch_invariant.verify.receipt.record import Model, bits_of, canonical, environment_from_json, number_of

NEXT = number_of(f"{int(bits_of(LOGPROBS[1]), 16) + 1:08x}")
"""The middle logprob with its lowest bit changed."""


def test_a_receipt_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = receipt(sampling=Sampling(max_tokens=3, temperature=1, seed=7, stop=("\n",), stop_token_ids=(4,)))
    made.save(tmp_path / "receipt.json")
    read = Receipt.load(tmp_path / "receipt.json")
    assert read == made
    assert read.sha256 == made.sha256


def test_a_receipt_names_its_adapter_and_only_then_how_adapters_are_added() -> None:
    added = {"adapters (K 192)": {"k": 192}}
    of_engine = replace(INFO, environment=replace(CPU, reductions=CPU.reductions | added))

    def made(adapter: Adapter | None) -> Receipt:
        info = replace(of_engine, adapter=adapter)
        return Receipt.of(info, PROMPT, Sampling(max_tokens=3, logprobs=2), completion(), private=False)

    first, second = (made(Adapter(name, name * 64)) for name in "ab")
    assert Receipt.from_json(first.to_json()) == first
    assert added.items() <= first.environment.reductions.items()
    assert made(None) == receipt()
    assert "adapter" not in json.loads(made(None).to_json())
    assert len({first.sha256, second.sha256, receipt().sha256}) == 3
    assert compare(first, first)
    with pytest.raises(
        NoTestError, match=r"different adapters: a \(a{12}\) in the first and b \(b{12}\) in the second"
    ):
        compare(first, second)
    with pytest.raises(NoTestError, match="none in the second"):
        compare(first, made(None))


PIXELS = Tensor((60, 1536), "uint8", "a" * 64)
PICTURE = Item("image", 1, 2, {"pixel_values": PIXELS})


def test_a_receipt_without_items_has_the_hash_that_it_had() -> None:
    assert receipt().sha256 == "6f0519e86715b422eda4287497394de6edf4f0bbbe8d9f8d179b9f7d0b63bee3"
    assert receipt(items=(PICTURE,)).sha256 != receipt().sha256


def test_a_receipt_with_items_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = receipt(items=(PICTURE,))
    made.save(tmp_path / "receipt.json")
    assert Receipt.load(tmp_path / "receipt.json") == made
    assert compare(made, made)
    assert "item 0, image" in str(page_of(made))
    with pytest.raises(BadReceipt, match="do not stand one behind the other"):
        receipt(items=(PICTURE, PICTURE))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(PICTURE, tensors={"pixel_values": replace(PIXELS, sha256="b" * 64)}), r"pixel_values is .*bbbb"),
        (replace(PICTURE, tensors={"pixel_values": replace(PIXELS, dtype="float32")}), r"1536\] float32 \(aaaa"),
        (replace(PICTURE, tensors={"pixel_values": PIXELS, "grid": PIXELS}), "grid is .* instead of none"),
        (replace(PICTURE, tokens=1), "it has 1 tokens from 1 on instead of 2"),
        (replace(PICTURE, kind="audio"), "the items are audio instead of image"),
        (None, "the items are none instead of image"),
    ],
)
def test_receipts_about_other_items_are_not_compared(other: Item | None, said: str) -> None:
    right = receipt(items=(other,) if other else ())
    with pytest.raises(NoTestError, match=f"receipts of different items: .*{said}.*; that is the second"):
        compare(receipt(items=(PICTURE,)), right)


def test_a_receipt_of_items_is_computed_again_with_as_many(tmp_path: Path) -> None:
    made = receipt(items=(PICTURE,))
    require(made, ["image"])
    require(receipt(), [])
    with pytest.raises(NoTestError, match=r"the receipt's request has 1 image, and none given: .*, --image"):
        require(made, [])
    with pytest.raises(NoTestError, match="has 1 image, and 1 image and 2 sounds given"):
        require(made, ["audio", "image", "audio"])
    with pytest.raises(NoTestError, match="has no images, videos or sounds: leave --audio out"):
        require(receipt(), ["audio"])
    with pytest.raises(NoTestError, match="1 image: the definition is of models that take tokens"):
        recompute(made, str(tmp_path))
    served = Page({"object": "list", "data": [{"id": "fake", "object": "model"}]})
    with fake_server(models=served) as url, pytest.raises(NoTestError, match="1 image: a server does not tell"):
        asyncio.run(verify_on_server(made, url))


def test_a_receipt_of_an_adapter_is_computed_again_with_one_alone() -> None:
    of_adapter = receipt(adapter=Adapter("mine", "a" * 64))
    with pytest.raises(NoTestError, match="has the LoRA adapter mine"):
        require_adapter(of_adapter, is_given=False)
    with pytest.raises(NoTestError, match="has no LoRA adapter"):
        require_adapter(receipt(), is_given=True)
    require_adapter(of_adapter, is_given=True)
    require_adapter(receipt(), is_given=False)


def test_a_server_makes_no_receipt_of_an_adapter() -> None:
    served = [{"id": "fake", "object": "model"}, {"id": "mine", "object": "model", "parent": "fake"}]
    with fake_server(models=Page({"object": "list", "data": served})) as url:
        for ask in (
            make_on_server(url, Text("x"), Sampling(), model="mine"),
            verify_on_server(receipt(), url, model="mine"),
        ):
            with pytest.raises(NoTestError, match="mine is a LoRA adapter of fake: a server does not tell the digest"):
                asyncio.run(ask)
        with pytest.raises(NoTestError, match="the completion has the LoRA adapter mine"):
            asyncio.run(verify_on_server(receipt(adapter=Adapter("mine", "a" * 64)), url))


def test_a_request_that_an_engine_refuses_is_one_line() -> None:
    pytest.importorskip("vllm")
    engine = SimpleNamespace(has_unfinished_requests=lambda: False, abort_request=lambda names: None)
    with pytest.raises(NoTestError, match=r"the engine refuses the request: top_p must be in \(0, 1\], got 7"):
        complete(SimpleNamespace(llm_engine=engine), PROMPT, Sampling(top_p=7.0))


def test_the_hash_is_the_sha256_of_the_canonical_json_of_everything_before_it() -> None:
    data = json.loads(receipt().to_json())
    assert list(data)[-1] == "sha256"
    claimed = data.pop("sha256")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert claimed == hashlib.sha256(text.encode()).hexdigest()


def test_equal_completions_have_one_hash_and_any_bit_another() -> None:
    assert receipt().sha256 == receipt(sampling=Sampling(max_tokens=3, temperature=0, logprobs=2)).sha256
    assert receipt(completion=completion(logprobs=(LOGPROBS[0], NEXT, LOGPROBS[2]))).sha256 != receipt().sha256


@pytest.mark.parametrize("value", [-0.5, -0.0, 0.0, -1.1920928955078125e-07, -9999.0, -1.401298464324817e-45])
def test_bits_are_those_of_fp32_and_come_back(value: float) -> None:
    bits = bits_of(value)
    assert bits == f"{torch.tensor(value, dtype=torch.float32).view(torch.int32).item() % 2**32:08x}"
    assert math.copysign(1, number_of(bits)) == math.copysign(1, value)
    assert number_of(bits) == value


def test_a_logprob_that_somebody_rounded_is_refused() -> None:
    with pytest.raises(NoTestError, match=r"-0\.1 is no fp32 number"):
        bits_of(-0.1)


def test_an_infinite_logprob_is_what_a_server_sends_for_it() -> None:
    assert bits_of(-math.inf) == bits_of(-9999.0)
    assert bits_of(math.nan) == "7fc00000"


@pytest.mark.parametrize(
    ("change", "rehash", "line"),
    [
        (lambda data: data["completion"]["token_ids"].__setitem__(0, 4), False, "tampered with or damaged"),
        (lambda data: data.update(sha256="0" * 64), False, "tampered with or damaged"),
        (lambda data: data.pop("sha256"), False, "tampered with or damaged"),
        (lambda data: data.update(note="one more field"), False, "tampered with or damaged"),
        (lambda data: data["sampling"].update(temperature=math.nan), False, "NaN or an infinity"),
        (lambda data: data.update(version=2), True, "version 2, and this reads version 1"),
        (lambda data: data.pop("version"), True, "version None"),
        (lambda data: data.update(format="something"), True, "does not say"),
        (lambda data: data.update(note="one more field"), True, "right hash and wrong content: note"),
        (lambda data: data.pop("model"), True, "right hash and wrong content: model"),
        (lambda data: data["completion"]["logprobs"].__setitem__(0, "bf00"), True, "completion.logprobs.0"),
        (lambda data: data["completion"]["logprobs"].pop(), True, "not equally many"),
        (lambda data: data["prompt"]["token_ids"].append(1), True, "prompt's sha256"),
        (lambda data: data["model"].update(digest="0" * 64), True, "digest is not that of its files"),
        (lambda data: data["sampling"].update(temperature=0.5), True, "without a seed"),
        (lambda data: data["sampling"].update(temperature=0.5, seed=-1), True, "without a seed"),
        (lambda data: data["sampling"].update(seed=2**63), True, "no integer of 64 bits"),
        (lambda data: data["sampling"].update(temperature=-1.0), True, "sampling.temperature"),
        (lambda data: data["sampling"].update(top_p=0.0), True, "sampling.top_p"),
        (lambda data: data["sampling"].update(min_p=1.5), True, "sampling.min_p"),
        (lambda data: data["sampling"].update(top_k=-2), True, "sampling.top_k"),
        (lambda data: data["sampling"].update(repetition_penalty=0.0), True, "sampling.repetition_penalty"),
        (lambda data: data["sampling"].update(max_tokens=2), True, "has 3 tokens, and the request at most 2"),
        (lambda data: data["completion"]["top_logprobs"][1].reverse(), True, "not in ascending order"),
        (lambda data: data["completion"]["top_logprobs"][1].append([99, "c0400000"]), True, "not in ascending order"),
        (lambda data: data.update(trace=[{"position": -1, "rows": 1, "digests": {}}]), True, "trace.0.position"),
        (lambda data: data.update(trace=[{"position": 0, "rows": 0, "digests": {}}]), True, "trace.0.rows"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused_in_one_line(
    change: Callable[[dict[str, Any]], Any], rehash: bool, line: str, tmp_path: Path
) -> None:
    path = tmp_path / "receipt.json"
    if "NaN" in line:
        text = receipt().to_json().replace('"temperature": 0.0', '"temperature": NaN')
    else:
        text = rewritten(receipt(), change, rehash)
    path.write_text(text)
    with pytest.raises(BadReceipt) as refusal:
        Receipt.load(path)
    assert line in str(refusal.value)
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe\x00", b'{"format": 1}', b"[" * 100_000])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadReceipt, match="this is no receipt"):
        Receipt.load(path)


@pytest.mark.parametrize(
    ("once", "twice"),
    [
        ('"completion": ', '"completion": {}, "completion": '),
        ('"name": ', '"name": "another", "name": '),
        ('"version": 1', '"version": 1, "version": 1'),
    ],
)
def test_a_field_that_is_there_twice_is_refused(once: str, twice: str) -> None:
    """Some readers would take the first, and the hash is of the last."""
    with pytest.raises(BadReceipt, match="a field is in it twice"):
        Receipt.from_json(receipt().to_json().replace(once, twice, 1))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    receipt().save(tmp_path / "receipt.json")
    with pytest.raises(NoTestError, match=r"receipt.json cannot be written: File exists"):
        receipt().save(tmp_path / "receipt.json")


def test_a_private_receipt_has_the_prompts_sha256_and_not_its_tokens() -> None:
    made = Receipt.of(INFO, PROMPT, Sampling(), completion(), private=True)
    assert made.prompt == Prompt(3, hashlib.sha256(b"[11,12,13]").hexdigest())
    assert str(list(PROMPT)) not in made.to_json()
    assert made.prompt.ids(PROMPT) == PROMPT
    with pytest.raises(NoTestError, match="it holds only a sha256 of its prompt"):
        made.prompt.ids()
    with pytest.raises(NoTestError, match="of 3 tokens, is not the receipt's, of 3"):
        made.prompt.ids((11, 12, 14))


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("model", "model"),
        ("/home/somebody/models/Qwen3-8B/", "Qwen3-8B"),
        ("~/Qwen3-8B", "Qwen3-8B"),
        ("./Qwen3-8B", "Qwen3-8B"),
        ("home/somebody/Qwen3-8B", "Qwen3-8B"),
        (r"C:\Users\somebody\Qwen3-8B", "Qwen3-8B"),
        ("/home/somebody/.cache/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", "Qwen/Qwen3-8B"),
        ("s3://key:password@bucket/Qwen3-8B", "Qwen3-8B"),
    ],
)
def test_a_models_name_does_not_say_where_it_lies(name: str, public: str) -> None:
    assert public_name(name) == public


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's files, and a cache of their own for digests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "somebody" / "model"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors", "README.md", "old.bin"):
        (folder / name).write_text(name)
    return folder


def test_the_digest_is_of_weights_configuration_and_tokenizer(folder: Path) -> None:
    model = model_at(folder, str(folder))
    assert sorted(model.files) == ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
    assert model.files["config.json"] == hashlib.sha256(b"config.json").hexdigest()
    assert model.digest == hashlib.sha256(canonical(model.files)).hexdigest()
    assert model.name == "model"


def test_a_changed_file_has_another_digest_and_an_unchanged_one_is_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_at(folder, "model")
    read: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(file.name) or digest(file, name))
    assert model_at(folder, "model") == before
    assert not read
    weights = folder / "model-2.safetensors"
    weights.write_text("MODEL-2.safetensors")  # as long as before
    os.utime(weights, ns=(1, 1))
    after = model_at(folder, "model")
    assert read == [str(weights)]
    assert after.digest != before.digest


def test_a_file_whose_time_was_set_back_is_read_again(folder: Path) -> None:
    """As a copy that keeps times does, of weights as large as those before."""
    weights = folder / "model-1.safetensors"
    before, times = model_at(folder, "model"), weights.stat()
    weights.write_text("MODEL-1.safetensors")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = model_at(folder, "model")
    assert after.files["model-1.safetensors"] == hashlib.sha256(b"MODEL-1.safetensors").hexdigest()
    assert after.digest != before.digest


@pytest.mark.parametrize("content", ["", "{}", '{"content": {"a": 1}, "sha256": ""}'])
def test_digests_that_are_kept_in_a_broken_file_are_computed_again(
    folder: Path, content: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    before = model_at(folder, "model")
    [kept] = (tmp_path / "cache").rglob("*.json")
    kept.write_text(content)
    assert model_at(folder, "model") == before
    kept_file.update(kept, lambda _: {"key": "no digest"})
    assert model_at(folder, "model") == before
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_an_engine_that_made_its_weights_up_has_no_digest_of_files(folder: Path) -> None:
    pytest.importorskip("vllm")

    def info(load_format: str) -> Model:
        config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        model = SimpleNamespace(hf_config=None, model=str(folder), revision=None, is_encoder_decoder=False)
        return engine_info(SimpleNamespace(llm_engine=SimpleNamespace(model_config=model, vllm_config=config))).model

    assert info("auto").digest is not None
    assert (info("dummy").name, info("dummy").digest) == ("model", None)
    assert "made its weights up" in info("dummy").why_no_digest


def test_without_files_the_receipt_says_why_there_is_no_digest(tmp_path: Path) -> None:
    absent = model_at(None, "model", "they are elsewhere")
    assert (absent.digest, absent.files, absent.why_no_digest) == (None, {}, "they are elsewhere")
    assert "no weights" in model_at(tmp_path, "model").why_no_digest
    (tmp_path / "config.json").write_text("{}")
    assert (model_at(tmp_path, "model").digest, model_at(tmp_path, "model").files) == (None, {}), "a part is no model"


def with_environment(**other: Any) -> Receipt:
    return receipt(environment=replace(CPU, **other))


def test_receipts_of_one_completion_are_equal_and_nothing_is_noted() -> None:
    same = receipt(model=model_at(None, "organisation/model", "the same"))
    verdict = compare(receipt(), same)
    assert verdict
    assert verdict.status is Status.REPRODUCIBLE
    assert "equal: 3 tokens and the bits of 9 logprobs" in str(verdict)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"device": CPU.device | {"threads": 4}}, "device: threads 2 in the first and 4 in the second"),
        ({"device": {"type": "cuda", "name": "NVIDIA H200", "capability": "9.0"}}, "type cpu in the first and cuda in"),
        ({"versions": CPU.versions | {"torch": "2.11.0"}}, "versions: torch 2.13.0 in the first and 2.11.0 in"),
        ({"versions": CPU.versions | {"vllm-batch-invariant": "0.1.0 (f09d3c1b8ae2)"}}, "(0123456789ab) in the first"),
        ({"engine": CPU.engine | {"logprobs_mode": "processed_logprobs"}}, "engine: logprobs_mode raw_logprobs in"),
        (
            {"reductions": {"attention": {"implementation": "numba", "split_size": 512}}},
            "reductions: attention split_size 256 in the first and 512 in the second",
        ),
        ({"mode": False, "versions": {}, "device": {}, "engine": {}, "reductions": {}}, "mode: off in the second"),
    ],
)
def test_each_other_thing_of_an_engine_is_one_line_that_promises_nothing(other: dict[str, Any], said: str) -> None:
    verdict = compare(receipt(), with_environment(**other))
    lines = [line for line in str(verdict).splitlines() if said in line]
    assert len(lines) == 1
    assert lines[0].endswith("equal bits are not promised")
    assert not verdict.promised
    assert verdict  # the bits are the same even so


def test_what_neither_engine_reports_is_not_taken_for_equal() -> None:
    bare = Environment(mode=True, versions=CPU.versions)
    verdict = compare(receipt(environment=bare), receipt(environment=bare))
    lines = str(verdict).splitlines()
    for section in ("device", "engine", "reductions"):
        assert f"{section}: unknown in both: equal bits are not promised" in lines
    assert not verdict.promised
    assert "unknown" not in str(compare(receipt(), receipt()))


@pytest.mark.parametrize(
    ("change", "info"),
    [
        ({}, {}),
        ({"device_type": "cuda", "use_v2_model_runner": True}, {"model_runner": "second"}),
        ({"device_type": "cuda", "use_v2_model_runner": False}, {"model_runner": "first"}),
        ({"workers": 2}, {"tensor_parallel_size": "2"}),
        ({"stages": 2}, {}),
        ({"stages": 2, "workers": 4}, {"tensor_parallel_size": "4"}),
        ({"hf_overrides": {"b": {"x": 1}, "a": 2}}, {"hf_overrides": '{"a": 2, "b": {"x": 1}}'}),
        ({"model_class_overrides": {"A": "b:C"}}, {"model_class_overrides": '{"A": "b:C"}'}),
        ({"model_impl": "vllm"}, {}),
        ({"model_impl": "transformers"}, {"model_impl": "transformers"}),
        ({"quantization": "experts_int8"}, {"quantization": "int8 experts"}),
        ({"hf_config_path": "a/folder"}, {"hf_config_path": "f9d86028c6e0d64e"}),
        ({"rope_parameters": {"rope_type": "longrope"}}, {"max_model_len": "4096"}),
        ({"rope_scaling": {"type": "longrope"}}, {"max_model_len": "4096"}),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}),
        ({"strategy": "attn_head"}, {}),
        ({"cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        (
            {"cache_dtype": "fp8", "strategy": "attn_head"},
            {"kv_cache_dtype": "fp8", "kv_cache_scales": "one scale a head"},
        ),
        (
            {"cache_dtype": "fp8_per_token_head", "strategy": "attn_head"},
            {"kv_cache_dtype": "fp8_per_token_head"},
        ),
    ],
)
def test_settings_that_decide_bits_are_reported(change: dict[str, Any], info: dict[str, str]) -> None:
    rope = {name: change[name] for name in ("rope_parameters", "rope_scaling") if name in change}
    of_model = ("model_class_overrides", "model_impl", "quantization", "hf_config_path")
    model = SimpleNamespace(
        **{name: change[name] for name in of_model if name in change},
        architecture="A",
        hf_config=SimpleNamespace(to_dict=lambda: {"a": 1}),
        dtype=torch.bfloat16,
        logprobs_mode="raw_logprobs",
        hf_overrides=change.get("hf_overrides", {}),
        hf_text_config=SimpleNamespace(**rope),
        max_model_len=4096,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=change.get("cache_dtype", "auto")),
        quant_config=SimpleNamespace(kv_cache_scheme={"strategy": change.get("strategy", "tensor")}),
        device_config=SimpleNamespace(device_type=change.get("device_type", "cpu")),
        use_v2_model_runner=change.get("use_v2_model_runner"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=change.get("workers", 1),
            pipeline_parallel_size=change.get("stages", 1),
            data_parallel_size=1,
        ),
    )
    usual = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "logprobs_mode": "raw_logprobs"}
    assert endpoint.settings(config, devices.of_config(config)) == usual | info


def test_what_a_model_has_taken_of_settings_is_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    assert endpoint.taken(model) == {}
    model[0].attn_temperature_tuning = model[1].attn_temperature_tuning = False
    assert endpoint.taken(model) == {"attn_temperature_tuning": "False"}
    model[1].attn_temperature_tuning, model._suppress_token_ids = True, [7, 8]
    assert endpoint.taken(model) == {"attn_temperature_tuning": "True", "suppress_tokens": "[7, 8]"}


def test_a_silent_engine_is_noted_once_with_what_to_do() -> None:
    verdict = compare(receipt(), receipt(environment=Environment(versions={"vllm": "0.26.0"})))
    said = str(verdict)
    assert "unknown engine: the second (a server with the mode on describes itself at /v1/batch_invariant): " in said
    assert "versions: vllm 0.32.0 in the first and 0.26.0 in the second" in said
    assert "device:" not in said


def test_the_same_files_under_another_name_are_the_same_model(folder: Path) -> None:
    one, other = (receipt(model=model_at(folder, name)) for name in ("one", "other"))
    verdict = compare(one, other)
    assert "model: one in the first and other in the second, with the same files: bits may be expected equal" in str(
        verdict
    )
    assert verdict.promised


def test_receipts_of_different_models_are_not_compared(folder: Path) -> None:
    with pytest.raises(NoTestError, match="receipts of different models: organisation/model in the first and other in"):
        compare(receipt(), receipt(model=model_at(None, "other", "elsewhere")))
    one = receipt(model=model_at(folder, "model"))
    (folder / "model-1.safetensors").write_text("other weights")
    with pytest.raises(NoTestError, match=r"different models: model, with other model-1.safetensors$"):
        compare(one, receipt(model=model_at(folder, "model")))


def test_receipts_of_different_requests_are_not_compared() -> None:
    with pytest.raises(NoTestError, match="different requests: max_tokens 3 in the first and 4 in the second"):
        compare(receipt(), receipt(sampling=Sampling(max_tokens=4, logprobs=2)))
    with pytest.raises(NoTestError, match="different prompts, of 3 and 2 tokens"):
        compare(receipt(), receipt(prompt=Prompt.of((1, 2))))


@pytest.mark.parametrize(
    ("other", "position", "said"),
    [
        (completion(tokens=(5, 8, 7)), 1, "token 1 is 8 instead of 6"),
        (completion((5, 6), LOGPROBS[:2]), 2, "token 2 is the end (length) instead of 7"),
        (
            completion(logprobs=(LOGPROBS[0], NEXT, LOGPROBS[2])),
            1,
            "at token 1 the logprob of 6 is 0xbfa00001 (-1.2500001192092896) instead of 0xbfa00000 (-1.25); "
            "all tokens are the same",
        ),
        (
            completion((5, 6, 8), (LOGPROBS[0], NEXT, LOGPROBS[2])),
            1,
            "at token 1 the logprob of 6 is 0xbfa00001 (-1.2500001192092896) instead of 0xbfa00000 (-1.25); "
            "tokens differ from 2 on",
        ),
        (replace(completion(), finish_reason="stop"), 3, "but it ended by 'stop' instead of 'length'"),
    ],
)
def test_the_first_difference_is_named_with_its_place_and_bits(other: Any, position: int, said: str) -> None:
    difference = first_difference_of(completion(), other)
    assert difference is not None
    assert difference.position == position
    assert said in str(difference)


def test_a_candidate_beside_the_chosen_token_counts_too() -> None:
    changed = [list(entry) for entry in completion().top_logprobs]
    changed[2] = [(7, bits_of(LOGPROBS[2])), (99, bits_of(-3.5))]
    other = replace(completion(), top_logprobs=tuple(map(tuple, changed)))
    assert "at token 2 the logprob of 99 is 0xc0600000 (-3.5)" in str(first_difference_of(completion(), other))
    changed[2] = [(7, bits_of(LOGPROBS[2])), (98, bits_of(-3.0))]
    other = replace(completion(), top_logprobs=tuple(map(tuple, changed)))
    assert "candidate 98 is new" in str(first_difference_of(completion(), other))
    changed[2] = [(99, bits_of(-3.0))]
    other = replace(completion(), top_logprobs=tuple(map(tuple, changed)))
    assert "candidate 7 is no longer listed" in str(first_difference_of(completion(), other))


def test_a_trainers_logprobs_are_compared_by_their_bits() -> None:
    assert difference_of_logprobs(receipt(), torch.tensor(LOGPROBS)) is None
    assert difference_of_logprobs(receipt(), LOGPROBS) is None
    difference = difference_of_logprobs(receipt(), torch.tensor([LOGPROBS[0], NEXT, LOGPROBS[2]]))
    assert difference is not None
    assert difference.position == 1
    with pytest.raises(NoTestError, match="2 logprobs cannot be those of 3 tokens"):
        difference_of_logprobs(receipt(), LOGPROBS[:2])


def test_a_gpu_reports_its_architecture_and_how_it_multiplies_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = environment_here(
        "cuda",
        versions={},
        device=devices.get("cuda").info(),
        hidden=64,
        vocabulary=128,
        dtype=torch.float32,
        attention=AttentionReduction(512, ((256, 2048),)),
        attention_by="triton",
        engine={},
    )
    assert found.device == {"type": "cuda", "name": "NVIDIA H200", "capability": "9.0"}
    assert found.reductions["linear (output head)"]["precision"] == "ieee"
    assert found.reductions["attention"] == {
        "implementation": "triton",
        "split_size": 512,
        "early": "((256, 2048),)",
        "key_tile": 64,
    }
    assert environment_from_json(asdict(found)) == found
