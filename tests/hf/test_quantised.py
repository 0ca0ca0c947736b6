"""Transformers makes of a quantised checkpoint the matrices that it stands for, as the page on trainers has it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.assertions import assert_same_bits
from tests.docs.documents import ROOT, blocks
from tests.engine.engines import some_exhaustive
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.quantised_model import CHECKPOINT_FORMATS

pytest.importorskip("compressed_tensors")

OF_COMPRESSED_TENSORS = [
    name
    for name, form in CHECKPOINT_FORMATS.items()
    if form.config["quant_method"] == "compressed-tensors" and not name.startswith(("w8a8", "w8a16-fp8-tensor"))
]
"""Of weights alone; scales of tensors in fp32 are rounded there before they are multiplied."""
SHAPE = Shape(hidden=256, intermediate=384, layers=1, vocab=512)


@pytest.mark.parametrize("form", some_exhaustive(OF_COMPRESSED_TENSORS, ["w4a16-g128-zp"]))
def test_a_trainer_has_the_matrices_of_a_quantised_checkpoint(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "MODEL", SHAPE, form=form, unpacked=tmp_path / "unpacked")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/trainer-parity.md").read_text()
    [example] = [code for language, code in blocks(page) if language == "python" and "CompressedTensorsConfig" in code]
    made: dict[str, torch.nn.Module] = {}
    with torch.compiler.set_stance("force_eager"):  # or compressed-tensors compiles how FP4 is rounded for a minute
        exec(example, made)
    matrices = load_file(tmp_path / "unpacked" / "model.safetensors")
    found = made["model"].state_dict()
    assert found.keys() == matrices.keys()
    for name, matrix in matrices.items():
        assert_same_bits(found[name], matrix, name)
