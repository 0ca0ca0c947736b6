"""The small models that see images: their files, and what is refused."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.verify.commands import ended
from vllm_batch_invariant.verify import demo_model, image_model
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

transformers = pytest.importorskip("transformers")

SMALL = {"layers": 2, "intermediate": 128, "vocab": 1024, "max_length": 512}


@pytest.mark.parametrize("name", image_model.FAMILIES)
def test_a_model_has_its_processor_and_tokens_and_the_same_files_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "training_text", lambda _: ["What is it? "] * 40)
    made = [make_checkpoint(tmp_path / str(n), Shape(images=name, **SMALL)) for n in range(2)]
    files = [{file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()} for folder in made]
    assert files[0] == files[1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made[0])
    config = json.loads((made[0] / "config.json").read_text())
    family = image_model.FAMILIES[name]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in family.special]
    assert config.get("image_token_id", config.get("image_token_index")) in ids
    assert max(ids) < 16, "prompts are drawn from 16 on"
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert family.items["image"] + "What is it?" in chat
    assert [tokenizer.encode(one, add_special_tokens=False) for one in family.lines] == [
        [tokenizer.convert_tokens_to_ids(one)] for one in family.lines
    ]


def test_images_go_with_no_format_and_no_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for more in (("--experts", "4"), ("--hybrid", "conv"), ("--format", "w4a16-g128")):
        said = ended(capsys, "make-checkpoint", tmp_path / "model", "--images", "gemma3", *more)
        assert said.status == 2
        assert "--images is a dense model of plain weights" in said.err
