"""What receipts of an engine in this process say: run by the driver, since the mode holds for a whole process."""

from dataclasses import replace
from typing import Any

from tests.faults.fuzz import inject
from vllm_batch_invariant.seeds import SAMPLE_ID
from vllm_batch_invariant.verify import receipt
from vllm_batch_invariant.verify.harness import images
from vllm_batch_invariant.verify.harness.engine import lora_request_of
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.receipt import engine, record
from vllm_batch_invariant.verify.receipt.pooled import compute

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": -3, "top_k": 40},
    {"temperature": 1.3, "seed": 2**62, "top_p": 0.8},
    {"temperature": 1.0, "seed": 11, "top_k": 100, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": -0.3},
)
"""One of each operation of the sampler."""


def traced(llm: Any, prompt: list[int]) -> str:
    """The text of a receipt with what each layer made; the engine has the worker extension of ``bisect``."""
    sampling = record.Sampling(max_tokens=5, logprobs=3)
    completion, trace = engine.traced(llm, tuple(prompt), sampling)
    return record.Receipt.of(engine.engine_info(llm), prompt, sampling, completion, False, trace).to_json()


def made(llm: Any, prompt: list[int], samplings: list[dict[str, Any]]) -> list[str]:
    """The texts of receipts of a prompt's completions with those parameters, computed together."""
    from vllm import SamplingParams

    asked = [SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True, **one) for one in samplings]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(asked), asked, use_tqdm=False)
    info = receipt.engine_info(llm)
    return [receipt.make(*both, info).to_json() for both in zip(outputs, asked, strict=True)]


def receipts(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """Make a receipt of a sample with a seed and a name, and compute it again as it is and with a bit changed."""
    from vllm import SamplingParams

    named = {"seed": 7, "extra_args": {SAMPLE_ID: "3"}}
    sampling = SamplingParams(temperature=0.9, top_k=50, max_tokens=12, logprobs=3, ignore_eos=True, **named)
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    made = receipt.make(output, sampling, receipt.engine_info(llm))
    logprobs = list(made.completion.logprobs)
    logprobs[4] = f"{int(logprobs[4], 16) ^ 1:08x}"
    changed = replace(made, completion=replace(made.completion, logprobs=tuple(logprobs)))
    generated = output.outputs[0]
    trainers = [listed[token].logprob for token, listed in zip(generated.token_ids, generated.logprobs, strict=True)]
    try:
        unseeded = SamplingParams(temperature=0.9, logprobs=3)
        refusal = receipt.make(output, unseeded, made.info).sha256
    except NoTestError as error:
        refusal = str(error)
    return {
        "receipt": made.to_json(),
        "verdict": str(receipt.verify(made, llm, concurrent=6)),
        "of changed": str(receipt.verify(changed, llm, concurrent=2)),
        "trainer agrees": receipt.difference_of_logprobs(made, trainers) is None,
        "without a seed": refusal,
    }


def with_adapter(llm: Any, prompt: list[int], folders: list[str]) -> dict[str, Any]:
    """A receipt of a completion with the adapter of the first folder, and what is said of it with each, and of one
    without an adapter.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.9, seed=7, max_tokens=12, logprobs=3, ignore_eos=True)
    adapters = [lora_request_of(folder, number) for number, folder in enumerate(folders, 1)]
    texts = []
    for adapter in (adapters[0], None):
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False, lora_request=adapter)
        texts.append(receipt.make(output, sampling, receipt.engine_info(llm)).to_json())
    made, without = map(receipt.Receipt.from_json, texts)
    verdicts = [receipt.verify(made, llm, concurrent=6, lora_request=one) for one in adapters]
    return {
        "receipt": texts[0],
        "without": texts[1],
        "equal": [bool(verdict) for verdict in verdicts],
        "said": [str(verdict) for verdict in verdicts],
        "of none": bool(receipt.verify(without, llm, concurrent=6)),
    }


def pooled(llm: Any, prompt: list[int], pair: list[str], wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Receipts of what a model pools of a prompt, or of a pair of texts, and what is said of them.

    Args:
        wanted: what is asked for, as ``record.Pooling`` has it.

    Returns:
        of each ``receipt``; ``by method``, the same made of what a method of ``LLM`` gives; ``said`` of it as it is,
        ``of changed`` with a bit changed, and ``faulty`` while the pooler takes another row beside others.
    """
    info, found = receipt.engine_info(llm), []
    for asked in wanted:
        asking = receipt.Pooling(**asked)
        about = tuple(pair) if asking.task == "score" else tuple(prompt)
        made = receipt.PooledReceipt.of(info, about, asking, compute(llm, about, asking)[0])
        values = list(made.pooled.values)
        values[-1] = f"{int(values[-1], 16) ^ 1:08x}"
        changed = replace(made, pooled=receipt.Pooled.of(map(record.number_of, values)))
        told = {
            "receipt": made.to_json(),
            "by method": receipt.make_pooled(_by_method(llm, about, asking), asking, info, **_of_pair(asking, about)),
            "said": str(receipt.verify_pooled(made, llm, concurrent=6)),
            "of changed": str(receipt.verify_pooled(changed, llm, concurrent=2)),
        }
        inject(llm, "pooler")
        told["faulty"] = str(receipt.verify_pooled(made, llm, concurrent=6))
        inject(llm, "")
        found.append(told | {"by method": told["by method"].to_json()})
    return found


def _of_pair(asking: record.Pooling, about: tuple[Any, ...]) -> dict[str, Any]:
    return {"pair": about} if asking.task == "score" else {}


def _by_method(llm: Any, about: tuple[Any, ...], asking: record.Pooling) -> Any:
    from vllm import PoolingParams

    params = PoolingParams(dimensions=asking.dimensions, use_activation=asking.activation)
    if asking.task == "score":
        return llm.score(*about, pooling_params=params, use_tqdm=False)[0]
    method = llm.embed if asking.task == "embed" else llm.classify
    return method([{"prompt_token_ids": [*about]}], pooling_params=params, use_tqdm=False)[0]


def about_items(
    llm: Any, tokens: list[int], items: list[dict[str, Any]], others: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """A receipt of an answer about items, and what is said of it with others in their place.

    Args:
        items: as the harness draws them, one behind the other.
        others: by a name; with ``flipped`` a pixel or a sample has its lowest bit changed.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.9, seed=7, max_tokens=8, logprobs=3, ignore_eos=True)
    info, prompt = receipt.engine_info(llm), images.prompt_of(llm, tokens, items)
    llm.llm_engine.reset_prefix_cache()
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    try:
        refusal = receipt.make(output, sampling, info).sha256
    except NoTestError as error:
        refusal = str(error)
    made = receipt.make(output, sampling, info, items=receipt.items_of(llm, prompt, output))
    verdicts = {}
    for name, given in {"the same": items, **others}.items():
        llm.llm_engine.reset_prefix_cache()
        data: dict[str, list[Any]] = {}
        for item in given:
            data.setdefault(item["kind"], []).append(_flipped(item) if "flipped" in item else images.data_of(item))
        try:
            verdicts[name] = str(receipt.verify(made, llm, concurrent=4, multi_modal_data=data))
        except NoTestError as error:
            verdicts[name] = f"refused: {error}"
    return {"receipt": made.to_json(), "said": verdicts, "without items": refusal}


def _flipped(item: dict[str, Any]) -> Any:
    """What vLLM takes, with one bit changed."""
    import numpy as np
    from PIL import Image

    data = images.data_of(item)
    values = np.array(data)
    if item["kind"] == "audio":
        values[len(values) // 2] = np.nextafter(values[len(values) // 2], np.float32(2), dtype=np.float32)
        return values
    values[1, 2, 1] ^= 1
    return Image.fromarray(values)


def text_alone(llm: Any, prompt: list[int]) -> str:
    """The receipt of a prompt without items."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return receipt.make(output, sampling, receipt.engine_info(llm)).to_json()
