"""A patched model gives a token the same logits in any batch."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.hf.models import DEVICE, FAMILIES, model, packed, sequences, ways_to_pad
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.hf import patch


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@torch.no_grad()
def logits_alone(trainer: torch.nn.Module, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [trainer(part[None]).logits[0] for part in parts]


def test_a_token_has_the_same_logits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    trainer, parts = patch(model(dtype)), sequences()
    alone = logits_alone(trainer, parts)
    with torch.no_grad():
        for way, (tokens, mask) in ways_to_pad(parts).items():
            logits = trainer(tokens, attention_mask=mask).logits
            for row, expected in enumerate(alone):
                assert_same_bits(logits[row][mask[row].bool()], expected, f"{way}, sequence {row}")
        tokens, positions = packed(parts)
        assert_same_bits(trainer(tokens, position_ids=positions).logits[0], torch.cat(alone), "packed")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_of_every_family_has_the_same_logits_alone_and_in_a_batch(name: str) -> None:
    kind, changed = FAMILIES[name]
    trainer, parts = patch(model(torch.bfloat16, kind, **changed)), sequences()
    tokens, mask = ways_to_pad(parts)["left"]
    with torch.no_grad():
        logits = trainer(tokens, attention_mask=mask).logits
    for row, expected in enumerate(logits_alone(trainer, parts)):
        assert_same_bits(logits[row][mask[row].bool()], expected, f"sequence {row}")


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


def test_the_mode_moves_no_bit_of_a_patched_model() -> None:
    trainer, [part] = patch(model()), sequences((45,))
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
