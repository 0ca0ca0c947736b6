"""The page on recipes says what the file beside it says, and recipes are read as their site shows them."""

import re
from pathlib import Path

import pytest
import yaml

from scripts import marks
from scripts.recipes import reader
from scripts.recipes.models import CHECKPOINTS, FORMS, UNKNOWN
from scripts.recipes.table import BEGIN, END, PAGE, kinds_of, page_table, read
from scripts.trainers.examples import Mirror
from scripts.trainers.gate import REFUSED

RECIPE = """
meta: {tasks: [text]}
model: {model_id: A/B, base_args: [--trust-remote-code, "--max-model-len auto"], base_env: {VLLM_A: 1, OTHER: 2}}
features:
  reasoning: {args: [--reasoning-parser, r]}
  tools: {args: [--enable-auto-tool-choice, --tool-call-parser, t]}
  text_only: {args: [--language-model-only]}
  spec_decoding:
    default_mode: x
    modes:
      x: {variants: [other], args: [--speculative-config, '{"method": "x"}']}
      y: {args: [--speculative-config.method, y, --speculative-config.num_speculative_tokens, "2"]}
opt_in_features: [text_only, spec_decoding]
variants:
  default: {precision: bf16, vram_minimum_gb: 141}
  fp8: {model_id: A/C, precision: fp8, vram_minimum_gb: 142, extra_args: [-tp, --tensor-parallel-size, "8", --a.b=1]}
  amd: {precision: mxfp4, vram_minimum_gb: 600, supported_hardware: [mi355x]}
hardware_overrides:
  hopper: {extra_args: [--no-enable-prefix-caching, --max-model-len, "8"]}
  nvidia: {extra_args: [--never]}
"""


class File(Mirror):
    """A mirror of one recipe."""

    def __init__(self, text: str) -> None:
        super().__init__(Path())
        self._text = text

    def paths(self, folder: str, *endings: str) -> list[str]:
        return ["models/A/B.yaml"]

    def text(self, path: str) -> str:
        return self._text


def test_the_tables_are_those_of_the_file() -> None:
    assert marks.between(PAGE.read_text(), BEGIN, END).strip() == page_table(read())


def test_every_row_names_its_source_and_says_what_came_of_it() -> None:
    rows = read()
    assert len({(row.recipe, row.variant) for row in rows}) == len(rows)
    assert len({(row.commit, row.date) for row in rows}) == 1
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{10}", row.commit)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
        assert row.verdict, row
        assert row.is_asked == bool(row.with_features)
        assert bool(row.drafts) == bool(row.with_drafts)
        assert row.quantisation in ("", *FORMS)


def test_every_checkpoint_that_is_known_is_asked_for() -> None:
    assert {*CHECKPOINTS} <= {row.checkpoint for row in read()}
    unknown = {name for name, checkpoint in CHECKPOINTS.items() if checkpoint.form == UNKNOWN}
    assert not [row for row in read() if row.checkpoint in unknown and row.quantisation]


def test_a_recipe_is_read_as_its_site_shows_it_for_an_h200() -> None:
    first, second, third = reader.variants(File(RECIPE))
    assert (first.recipe, first.checkpoint, first.gpus) == ("A/B", "A/B", 1)
    assert first.arguments == {
        "trust_remote_code": True,
        "max_model_len": 8,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 1,
    }
    assert first.variables == {"VLLM_A": "1"}
    assert first.features == {"reasoning_parser": "r"}
    assert first.drafts == {"speculative_config": {"method": "y", "num_speculative_tokens": 2}}
    assert (second.checkpoint, second.gpus) == ("A/C", 2)
    assert second.arguments["tensor_parallel_size"] == 2
    assert second.arguments["a"] == {"b": 1}
    assert (third.hardware, third.gpus) == ("mi355x", 8)


@pytest.mark.parametrize(("task", "engine"), [("omni", "vllm-omni"), ("text", "vllm")])
def test_recipes_of_vllm_omni_are_another_engine_s(task: str, engine: str) -> None:
    tree = yaml.safe_load(RECIPE)
    tree["meta"]["tasks"] = [task]
    assert {found.engine for found in reader.variants(File(yaml.safe_dump(tree)))} == {engine}


def test_reasons_that_differ_in_a_scale_are_one_kind() -> None:
    one = (
        f"{REFUSED}x with quantisation m with float8 weights (one scale a tensor) and float8 static tensor activations"
    )
    other = f"{REFUSED}x with quantisation m with float8 weights (one scale a channel) and float8 dynamic activations"
    assert kinds_of(one) == kinds_of(other) == ["x with quantisation m with float8 weights and activations"]
    assert kinds_of(f"{REFUSED}a; b; a") == ["a", "b"]
