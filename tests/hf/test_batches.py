"""A patched model gives a token the same logits in any batch."""

from collections.abc import Callable

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.assertions import DTYPES, assert_same_bits
from tests.hf.models import DEVICE, FAMILIES, model, packed, sequences, ways_to_pad
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.hf import patch, recurrence


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@torch.no_grad()
def logits_alone(trainer: torch.nn.Module, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [trainer(part[None]).logits[0] for part in parts]


@torch.no_grad()
def assert_same_in_every_batch(trainer: torch.nn.Module) -> None:
    parts = sequences()
    alone = logits_alone(trainer, parts)
    for way, (tokens, mask) in ways_to_pad(parts).items():
        logits = trainer(tokens, attention_mask=mask).logits
        for row, expected in enumerate(alone):
            assert_same_bits(logits[row][mask[row].bool()], expected, f"{way}, sequence {row}")
    tokens, positions = packed(parts)
    assert_same_bits(trainer(tokens, position_ids=positions).logits[0], torch.cat(alone), "packed")


def test_a_token_has_the_same_logits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    assert_same_in_every_batch(patch(model(dtype)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_of_every_family_has_the_same_logits_alone_and_in_any_batch(name: str) -> None:
    kind, changed = FAMILIES[name]
    assert_same_in_every_batch(patch(model(torch.bfloat16, kind, **changed)))


@pytest.mark.skipif(DEVICE == "cuda", reason="gradients of layers with states are a CPU's")
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Qwen3.5", "ConvStates"),
        ("Qwen3.5", "DeltaStates"),
        ("Nemotron-H", "ConvStates"),
        ("Nemotron-H", "DeltaStates"),
        ("LFM2, tied", "ConvStates"),
    ],
)
def test_a_state_that_goes_on_in_the_next_sequence_is_seen(
    name: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changed = FAMILIES[name]
    trainer, parts = patch(model(torch.bfloat16, kind, **changed)), sequences()
    alone, (tokens, positions) = logits_alone(trainer, parts), packed(parts)
    monkeypatch.setattr(recurrence, kept, as_one_sequence(getattr(recurrence, kept)))
    with torch.no_grad():
        logits = trainer(tokens, position_ids=positions).logits[0]
    found = logits.split([len(part) for part in parts])
    assert_same_bits(found[0], alone[0])
    assert all(not torch.equal(ours, expected) for ours, expected in zip(found[1:], alone[1:], strict=True))


def as_one_sequence(states: Callable[..., object]) -> Callable[..., object]:
    """What makes states of one sequence of all tokens."""

    def made(held: torch.Tensor, pages: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, *rest: int) -> object:
        ends = starts[[0, -1]]
        return states(held[:1], pages[:1], ends, lens[:1], int(ends[1]), *rest[1:])

    return made


@pytest.mark.parametrize("kind", ["Qwen3, tied", "Qwen3.5"])
@torch.no_grad()
def test_what_hugging_faces_collator_says_of_sequences_in_a_row_is_read(kind: str) -> None:
    of, changed = FAMILIES[kind]
    trainer, parts = patch(model(torch.bfloat16, of, **changed)), sequences((45, 1, 7))
    alone = torch.cat(logits_alone(trainer, parts))
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collator([{"input_ids": part} for part in parts])
    batch = {name: one.to(DEVICE) if isinstance(one, torch.Tensor) else one for name, one in batch.items()}
    del batch["labels"]
    assert_same_bits(trainer(**batch).logits[0], alone)
    for name in ("cu_seq_lens_q", "seq_idx", "position_ids"):
        assert_same_bits(trainer(batch["input_ids"], **{name: batch[name]}).logits[0], alone, name)
    assert not torch.equal(trainer(batch["input_ids"]).logits[0], alone)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU so small a model need not vary")
def test_hugging_face_fails_the_same_comparison() -> None:
    trainer, parts = model(torch.float32).eval(), sequences()
    tokens, mask = ways_to_pad(parts)["right"]
    with torch.no_grad():
        logits = trainer(tokens, attention_mask=mask).logits
    alone = logits_alone(trainer, parts)
    assert any(not torch.equal(logits[row, : len(one)], one) for row, one in enumerate(alone))


def test_a_token_sees_those_before_it_and_no_other() -> None:
    trainer, [part] = patch(model()), sequences((300,))
    [before] = logits_alone(trainer, [part])
    part[150] = (part[150] + 1) % 300
    [after] = logits_alone(trainer, [part])
    assert_same_bits(after[:150], before[:150])
    assert all(not torch.equal(after[place], before[place]) for place in (150, 200, 299))


def test_logits_of_the_last_tokens_are_those_of_all() -> None:
    trainer, parts = patch(model()), sequences()
    tokens, mask = ways_to_pad(parts)["left"]
    with torch.no_grad():
        every = trainer(tokens, attention_mask=mask).logits
        assert_same_bits(trainer(tokens, attention_mask=mask, logits_to_keep=3).logits, every[:, -3:])


@pytest.mark.parametrize("name", ["Qwen3, tied", "Qwen3-MoE", "Qwen3.5", "Nemotron-H", "LFM2, tied"])
def test_the_mode_moves_no_bit_of_a_patched_model(name: str, dtype: torch.dtype) -> None:
    """So no operation is PyTorch's own that the engine has another for."""
    kind, changed = FAMILIES[name]
    trainer, [part] = patch(model(dtype, kind, **changed)), sequences((45,))
    outside = logits_alone(trainer, [part])
    with batch_invariant_mode():
        assert_same_bits(logits_alone(trainer, [part])[0], outside[0])


def test_embeddings_can_be_given_instead_of_tokens() -> None:
    trainer, parts = patch(model()), sequences()
    tokens, mask = ways_to_pad(parts)["right"]
    with torch.no_grad():
        by_tokens = trainer(tokens, attention_mask=mask).logits
        given = trainer(inputs_embeds=trainer.model.embed_tokens(tokens), attention_mask=mask).logits
    assert_same_bits(given, by_tokens)


def test_tied_embeddings_are_used_as_the_output_head() -> None:
    trainer, [part] = patch(model(tie_word_embeddings=True)), sequences((9,))
    [before] = logits_alone(trainer, [part])
    with torch.no_grad():
        trainer.model.embed_tokens.weight[299] *= 2
    [after] = logits_alone(trainer, [part])
    assert 299 not in part
    assert_same_bits(after[:, :299], before[:, :299])
    assert not torch.equal(after[:, 299], before[:, 299])
