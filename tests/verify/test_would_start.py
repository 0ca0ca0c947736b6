"""``vllm-batch-invariant coverage MODEL``: what the start-up check says, without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "vocab_size": 512,
}
PROGRAM = """
import sys
from vllm_batch_invariant.cli import main
for number, words in enumerate((
    [], ["--serve-args=--pipeline-parallel-size 3 --logits-processors a:B"],
    ["--serve-args=--no-such-argument"],
)):
    print(main(["coverage", sys.argv[1], *words, "--json", f"{sys.argv[1]}/{number}.json"]))
"""


def test_a_model_and_arguments_start_or_are_refused_in_a_line_that_has_all(tmp_path: Path) -> None:
    """And what vLLM itself does not take could not be told."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(("starts", "0", "2"))]
    assert [said[0].startswith("starts: Qwen3ForCausalLM in bfloat16 on cpu"), *said[1:]] == [True, "0", "2", "2"]
    begun, refused = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert (begun["starts"], begun["refused"], begun["serve_args"]) == (True, None, [])
    assert refused["starts"] is False
    assert "does not cover pipeline parallelism 3: " in refused["refused"]
    assert refused["refused"].endswith(" Nor does it cover custom logits processors.")
    assert refused["refused"] in done.stderr
    assert not (tmp_path / "2.json").exists()
    assert "--serve-args: unrecognized arguments: --no-such-argument" in done.stderr
