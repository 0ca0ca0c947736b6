"""Images, videos and sounds beside what is published to draft for Gemma 4, which reads the KV caches of its target, and
beside GLM-OCR's layer for more tokens: a request has the tokens, logprobs and candidates of plain decoding, alone,
among others, from the caches and after a preemption.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import gemma4, images
from tests.engine.drafters import add_glm_ocr_mtp, prefer_few
from tests.engine.engines import Engine, differing_answers, untried_on_gpu
from tests.engine.quantised_layers import NVFP4, OF_32, ROWS
from tests.engine.test_quantised_images import FAMILIES, IN_FP8, ON, PLAIN, SCALED, Family, of_family
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.reviews import patch_points

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(RAN.encoding[ON]), reason="refused"),
    untried_on_gpu,
]
GLM_OCR = "glm-ocr"
CASES = [
    *(("31B", PLAIN), ("26B-A4B", PLAIN), ("12B", PLAIN), ("E2B", PLAIN)),
    *((name, OF_32) for name in ("31B", "12B", "E2B")),
    (f"31B, {IN_FP8}", PLAIN),
    *((f"{name}, {IN_FP8}", ROWS) for name in ("31B", "26B-A4B", "E2B")),
    (f"31B, {SCALED}", NVFP4[1]),
    *((f"26B-A4B, {kind}", form) for kind, form in zip((IN_FP8, SCALED), NVFP4, strict=True)),
    (GLM_OCR, PLAIN),
]
"""As published: weights, and the KV cache that its recipe asks for."""
FAULT = f"tests.engine.states:{'accept_every_draft' if ON == 'cuda' else 'soften_verify_steps'}"
"""CUDA graphs keep the attention that they were captured with."""


def family_of(name: str) -> Family:
    if name == GLM_OCR:
        return of_family(name)
    return FAMILIES["gemma4" if name == "31B" else f"gemma4, {name}"]


def save(config: Any, dtype: torch.dtype, folder: Path) -> None:
    images.save(config, dtype, folder)
    prefer_few(add_glm_ocr_mtp(folder) if config.model_type == "glm_ocr" else folder)


@pytest.mark.parametrize(("name", "form"), CASES, ids=[", ".join(case) for case in CASES])
def test_a_request_has_the_bits_of_plain_decoding_in_any_company(tmp_path: Path, name: str, form: str) -> None:
    """And not where verify steps scale scores otherwise, or, on a GPU, where every draft is accepted."""
    family = family_of(name)._replace(save=save)
    family.write(tmp_path, form)
    drafts = {"method": "mtp", "num_speculative_tokens": 4}
    if name != GLM_OCR:
        vocabulary = family.config().get_text_config().vocab_size
        drafter = gemma4.written_drafter(name.partition(",")[0], tmp_path / "drafter", vocab_size=vocabulary)
        drafts |= {"model": str(prefer_few(drafter))}
    drafting = family._replace(limits=family.limits | {"speculative_config": json.dumps(drafts)})
    asked, path = images.runs_of(*family.requests), tmp_path / "path"
    by_itself = [run for run in asked if "alone" in run]
    path.mkdir()

    def answers(engine: Engine, run: str) -> dict[str, Any]:
        requests, _, reset = asked[run]
        return engine.call("tests.engine.images:answers", requests, family.patch, reset)

    def started(of: Family, in_graphs: bool = True) -> Engine:
        return of.engine(tmp_path / "packed", path, in_graphs=in_graphs)

    with started(family) as engine:
        expected = [answers(engine, run)["given"][0] for run in by_itself]
    with started(drafting) as engine:
        found = {run: answers(engine, run) for run in asked}
        counts = engine.call("tests.engine.drafters:counts")
        engine.call(FAULT)
        faulty = answers(engine, "together")["given"]
    differing = {
        run: differing_answers(done["given"][asked[run][1]], expected)
        for run, done in found.items()
        if run not in by_itself
    }
    differing["alone"] = differing_answers([found[run]["given"][0] for run in by_itself], expected)
    assert {run: which for run, which in differing.items() if which} == {}
    assert 0 < counts["accepted"] < counts["drafts"]
    assert found["preempted"]["preemptions"] > 0
    assert differing_answers(faulty, expected), "the negative control"
