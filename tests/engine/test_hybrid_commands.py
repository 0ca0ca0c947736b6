"""What bisections and receipts say of models whose layers keep states."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import transformers

from tests.engine import kept_states, ling, multimodal
from tests.engine.engines import EAGER_ON_GPU, Result, run, tokens
from tests.engine.kept_states import LIMITS, ON_GPU, VOCABULARY, written
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.bisect.recorder import CONVOLUTION, CORE, GATES
from vllm_batch_invariant.verify.bisect.recording import MODULE_OUTPUT
from vllm_batch_invariant.verify.receipt import Receipt, compare

COVERED = reviews.ran().delta_rules["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "Qwen3.5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**kept_states.QWEN3_5)),
    "Nemotron-H": lambda: transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**kept_states.NEMOTRON_H)),
    "LFM2": lambda: transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**kept_states.LFM2)),
}
LING = "Ling 3.0"
OF_RULE = {"key_size": 64, "value_size": 64, "dtype": "bfloat16", "chunk": 16, "accumulate": "float32", "gates": "head"}
CONVOLVED = {"width": 4, "dtype": "bfloat16", "accumulate": "float32", "gated": "False"}
REDUCTIONS = {
    "Qwen3.5": {"convolution of 4 taps": CONVOLVED, "gated delta rule 1": OF_RULE | {"solve": "True"}},
    "Nemotron-H": {"convolution of 4 taps": CONVOLVED, "state space 1": OF_RULE | {"solve": "False"}},
    LING: {
        "convolution of 4 taps": CONVOLVED,
        "Kimi Delta Attention 1": OF_RULE | {"solve": "True", "gates": "channel"},
    },
    "LFM2": {"short convolution of 3 taps": CONVOLVED | {"width": 3, "gated": "True"}},
}
"""Of layers with states, in a receipt."""


@pytest.fixture(
    scope="module",
    params=[
        name if name == "Qwen3.5" else pytest.param(name, marks=pytest.mark.exhaustive) for name in (*MODELS, LING)
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(name: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp(name)
    of_ling = {"trust_remote_code": True} if name == LING else {}
    model = ling.written(folder / "model", "3.0") if of_ling else written(MODELS[name](), folder / "model")
    settings = {"model": str(model), **LIMITS, **EAGER_ON_GPU, **of_ling}
    path = os.pathsep.join([*multimodal.python_path(folder), kept_states.PATHS])
    prompt = tokens(90, 1, VOCABULARY)
    return run(settings, [], "1", receipts_of=prompt, bisection=("between_modules",), PYTHONPATH=path)


def test_a_receipt_holds_and_says_what_decides_the_bits_of_states(found: Result, name: str) -> None:
    said = found.receipts
    assert "equal: 12 tokens" in said["verdict"]
    assert "differs: " in said["of changed"]
    environment = Receipt.from_json(said["receipt"]).environment
    assert {name: environment.reductions.get(name) for name in REDUCTIONS[name]} == REDUCTIONS[name]


@pytest.mark.parametrize(("field", "other"), [("chunk", 32), ("accumulate", "bfloat16")])
def test_another_chunk_or_state_is_the_difference_that_is_named(
    found: Result, name: str, field: str, other: object
) -> None:
    made = Receipt.from_json(found.receipts["receipt"])
    layer = list(REDUCTIONS[name])[-1]
    if field not in REDUCTIONS[name][layer]:
        pytest.skip("a short convolution has no chunks")
    reductions = made.environment.reductions | {layer: REDUCTIONS[name][layer] | {field: other}}
    elsewhere = replace(made, environment=replace(made.environment, reductions=reductions))
    [line] = [line for line in str(compare(made, elsewhere)).splitlines() if line.startswith("reductions")]
    right = REDUCTIONS[name][layer][field]
    assert line == (
        f"reductions: {layer} {field} {right} in the first and {other} in the second: equal bits are not promised"
    )


def test_a_bisection_names_what_a_layer_with_states_calls(found: Result, name: str) -> None:
    layer, bisected = found.bisected["path"], dict(found.bisected["found"])
    sound = bisected.pop("no fault")
    assert sound["found"] is None, sound["verdict"]
    assert list(bisected) == ([CONVOLUTION] if name == "LFM2" else [CONVOLUTION, GATES, CORE, "norm"])
    for fault, result in bisected.items():
        key = result["found"]["divergence"]["key"]
        is_module = fault == "norm" and name != LING
        expected = (f"{layer}.norm", MODULE_OUTPUT) if is_module else (layer, fault)
        assert (key["module"], key["operation"]) == expected, result["verdict"]
        assert result["found"]["output_token"] == 0
        assert result["found"]["repeats"]
