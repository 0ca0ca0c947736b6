"""Convolutions and attention of encoders of audio, and what they are called with."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.aten import set_batch_invariant_mode
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.engine import items
from vllm_batch_invariant.integration.layers import convolution, encoders, review
from vllm_batch_invariant.ops.softmax.reduction import SoftmaxReduction

CASES: dict[str, tuple[type[torch.nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "over time": (torch.nn.Conv1d, (40, 61), {"padding": 1}),
    "over time, every second": (torch.nn.Conv1d, (40, 62), {"padding": 1, "stride": 2}),
    "over frequencies and time": (torch.nn.Conv2d, (3, 17, 25), {"padding": 1, "stride": 2}),
    "of another height than width": (torch.nn.Conv2d, (3, 9, 12), {"stride": (1, 3), "padding": (0, 2), "bias": False}),
}


def layer(kind: type[torch.nn.Module], channels: int, dtype: torch.dtype, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(channels, 24, 3, **settings).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_convolution_gives_an_item_the_same_bits_in_any_call(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, sizes, settings = CASES[case]
    made, x = layer(kind, sizes[0], dtype, **settings), torch.randn(9, *sizes).to(dtype)
    expected = layer(kind, sizes[0], torch.float64, **settings)
    expected.load_state_dict(made.state_dict())
    encoders.convolution.replace_in(made)
    assert review._problem(made) is None
    with set_batch_invariant_mode():
        together = made(x)
        assert_near(together, expected(x.double()), factor=2)
        for number, item in enumerate(x):
            assert_same_bits(made(item[None])[0], together[number], f"item {number}")
            assert_same_bits(made(item), together[number], f"item {number} by itself")
        monkeypatch.setattr(convolution, "_UNFOLDED", 1)
        assert_same_bits(made(x), together, "in pieces")


def causal(channels: int, dtype: torch.dtype, size: int = 5) -> Any:
    """Gemma 4's convolution of each channel by itself, with what is before it."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioCausalConv1d

    torch.manual_seed(0)
    made = Gemma4AudioCausalConv1d(channels, channels, size, groups=channels, bias=False)
    return made.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_causal_convolution_of_each_channel_gives_a_row_the_same_bits_whatever_is_behind_it(
    dtype: torch.dtype,
) -> None:
    made, expected, x = causal(40, dtype), causal(40, torch.float64), torch.randn(9, 40, 61).to(dtype)
    expected.load_state_dict(made.state_dict())
    assert review._problem(made) is not None
    convolution.replace_in(made)
    assert review._problem(made) is None
    together = made(x)
    assert_near(together, expected(x.double()), factor=2)
    for length in (1, 4, 5, 6, 61):
        for number, item in enumerate(x):
            assert_same_bits(made(item[None, :, :length])[0], together[number, :, :length], f"item {number}")
    weight, start = made.weight.float()[:, 0], torch.nn.functional.pad(x.float(), (4, 0))
    total = torch.zeros(9, 40, 61)
    for tap in range(5):
        total = total + start[:, :, tap : tap + 61] * weight[:, tap, None]
    assert_same_bits(together, total.to(dtype), "the order of the sum")


def test_sounds_of_one_frame_keep_their_axis_of_frames() -> None:
    given: list[Any] = []
    model: Any = type("Gemma4ForConditionalGeneration", (torch.nn.Module,), {})()
    model.audio_tower = type("Gemma4AudioModel", (torch.nn.Module,), {"__module__": "transformers.models.gemma4"})()
    model.audio_tower.config = SimpleNamespace()
    model._tower_model_names = ["audio_tower"]
    model._parse_and_validate_audio_input = lambda **named: given.append(named)
    encoders.prepare(model)
    assert model.audio_tower.config._attn_implementation == encoders.IN_BLOCKS
    assert encoders.problem_of_tower(model.audio_tower) is None
    model.audio_tower.config._attn_implementation = "eager"
    assert encoders.problem_of_tower(model.audio_tower) == "Transformers' attention is eager"
    features, mask = torch.zeros(3, 1, 128), torch.ones(3, 1, dtype=torch.bool)
    model._parse_and_validate_audio_input(input_features_padded=features, input_features_mask=mask, other=1)
    [called] = given
    assert [one.shape for one in called["input_features_padded"]] == [(1, 128)] * 3
    assert [one.shape for one in called["input_features_mask"]] == [(1,)] * 3
    assert called["other"] == 1


@pytest.mark.parametrize(
    "settings",
    [{"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}],
    ids=str,
)
def test_other_convolutions_are_refused(settings: dict[str, Any]) -> None:
    made = layer(torch.nn.Conv1d, 4, torch.float32, **settings)
    convolution.replace_in(made)
    with pytest.raises(
        NotCovered, match="a convolution in groups of channels, with gaps, or with other padding than zeros"
    ):
        review.check(made)


def test_a_convolution_of_pytorchs_is_refused() -> None:
    with pytest.raises(NotCovered, match=r"torch\.nn\.modules\.conv\.Conv1d"):
        review.check(layer(torch.nn.Conv1d, 4, torch.float32))


class Tower(torch.nn.Module):
    """What vLLM's tower of Qwen3-ASR has that is called, and what it was called with; a chunk is of eight frames."""

    n_window, conv_chunksize = 4, 500

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[list[int], list[int]]] = []

    def forward(
        self, input_features: torch.Tensor, feature_lens: torch.Tensor, aftercnn_lens: torch.Tensor
    ) -> torch.Tensor:
        assert input_features.shape[1] == feature_lens.sum()
        self.called.append((feature_lens.tolist(), aftercnn_lens.tolist()))
        return torch.arange(int(aftercnn_lens.sum()))

    def _get_cnn_output_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        return (lengths + 1) // 2


def prepared() -> Any:
    model: Any = type("Qwen3ASRForConditionalGeneration", (torch.nn.Module,), {})()
    model.audio_tower, model._tower_model_names = Tower(), ["audio_tower"]
    encoders.prepare(model)
    return model.audio_tower


@pytest.mark.parametrize(("lengths", "called"), [([3, 5], [3, 5, 8]), ([3, 8], [3, 8]), ([9], [9]), ([1], [1, 8])])
def test_sound_is_encoded_beside_a_whole_chunk(lengths: list[int], called: list[int]) -> None:
    tower, given = prepared(), torch.tensor(lengths)
    after = (given + 1) // 2
    assert tower(torch.zeros(128, sum(lengths)), feature_lens=given, aftercnn_lens=after).tolist() == list(
        range(after.sum())
    )
    assert tower.called == [(called, [(one + 1) // 2 for one in called])]


@pytest.mark.parametrize("rows", [1, 40], ids="a mask of {} rows".format)
def test_a_tower_of_transformers_attends_over_the_first_rows_of_an_item_with_the_same_bits_in_any_call(
    rows: int,
) -> None:
    torch.manual_seed(0)
    qkv, lengths = torch.randn(3, 4, 2, 40, 64), torch.tensor([3, 40, 17, 1])
    unseen = torch.arange(40) >= lengths[:, None, None, None]
    mask = torch.zeros(4, 1, rows, 40).masked_fill(unseen, float("-inf"))
    together, _ = encoders.attend_in_transformers(None, *qkv, mask, 0.125)
    weights = (qkv[0].double() @ qkv[1].double().mT * 0.125 + mask).softmax(-1)
    expected = (weights @ qkv[2].double()).transpose(1, 2)
    for item, length in enumerate(lengths.tolist()):
        alone, _ = encoders.attend_in_transformers(None, *qkv[:, item : item + 1], mask[item : item + 1], 0.125)
        assert_same_bits(together[item], alone[0], f"{length} rows")
        cut, _ = encoders.attend_in_transformers(None, *qkv[:, item : item + 1, :, :length], None, 0.125)
        assert_same_bits(together[item, :length], cut[0], f"{length} rows without a mask")
        assert_near(together[item, :length], expected[item, :length], factor=2)
        assert not together[item, length:].any()


def of_transformers(heads: int) -> Any:
    """A model with Qwen2-Audio's tower of one layer."""
    import transformers

    sizes = {"encoder_layers": 1, "d_model": 128, "encoder_ffn_dim": 128, "encoder_attention_heads": heads}
    model: Any = type("Qwen2AudioForConditionalGeneration", (torch.nn.Module,), {})()
    model.audio_tower = transformers.AutoModel.from_config(transformers.Qwen2AudioEncoderConfig(**sizes))
    model._tower_model_names = ["audio_tower"]
    return model


def test_a_tower_of_transformers_is_refused_with_other_attention_or_heads() -> None:
    model = of_transformers(2)
    assert encoders.problem_of_tower(model.audio_tower) == "Transformers' attention is sdpa"
    with pytest.raises(NotCovered, match="the encoder audio_tower: Transformers' attention is sdpa"):
        review.check(model)
    encoders.prepare(model)
    assert encoders.problem_of_tower(model.audio_tower) is None
    assert {type(model.audio_tower.conv1), type(model.audio_tower.conv2)} == {convolution.Conv1d}
    narrow = of_transformers(4)
    encoders.prepare(narrow)
    assert str(encoders.problem_of_tower(narrow.audio_tower)).endswith("and this one of 32")
    assert encoders.problem_of_tower(torch.nn.Linear(1, 1)) is None


def test_a_tower_of_transformers_is_found_that_vllm_has_noted_before_another() -> None:
    model = of_transformers(2)
    model._tower_model_names, model.other = ["other"], torch.nn.Identity()
    assert [*encoders.towers(model)] == ["other", "audio_tower"]
    with pytest.raises(NotCovered, match="the encoder audio_tower: Transformers' attention is sdpa"):
        review.check(model)
    encoders.prepare(model)
    assert encoders.problem_of_tower(model.audio_tower) is None


def test_a_layer_of_transformers_with_other_attention_is_refused_wherever_it_is() -> None:
    layer = of_transformers(2).audio_tower.layers[0].self_attn
    for chosen, problem in {
        "sdpa": "Transformers' attention is sdpa",
        "vllm": None,
        encoders.IN_TRANSFORMERS: None,
    }.items():
        layer.config._attn_implementation = chosen
        assert encoders.problem_of_attention(layer) == problem
    assert encoders.problem_of_attention(torch.nn.Linear(1, 1)) is None


def test_a_mask_of_transformers_says_which_rows_are_seen() -> None:
    from transformers.masking_utils import create_bidirectional_mask

    model = of_transformers(2)
    encoders.prepare(model)
    seen = torch.tensor([[True, True, False], [True, True, True]])
    mask = create_bidirectional_mask(model.audio_tower.config, torch.zeros(2, 3, 8), seen)
    assert mask.tolist() == seen[:, None, None].tolist()
    qkv = torch.randn(3, 2, 2, 3, 64)
    together, _ = encoders.attend_in_transformers(None, *qkv, mask, 0.125)
    cut, _ = encoders.attend_in_transformers(None, *qkv[:, :1, :, :2], None, 0.125)
    assert_same_bits(together[0, :2], cut[0], "without padding")


def test_towers_of_other_models_stay_as_they_are() -> None:
    model: Any = SimpleNamespace(tower=torch.nn.Conv1d(1, 1, 1), _tower_model_names=["tower"])
    encoders.prepare(model)
    assert type(model.tower) is torch.nn.Conv1d


def test_what_gemma_4_is_given_of_a_sound_follows_from_its_own_samples() -> None:
    """Products with filters are of as many rows as a request's longest sound has frames."""
    import numpy as np
    from transformers import Gemma4AudioFeatureExtractor

    kind: Any = type("Gemma4AudioFeatureExtractor", (Gemma4AudioFeatureExtractor,), {})
    plain, ours = Gemma4AudioFeatureExtractor(), kind()
    items.of_own_samples(None)
    items.of_own_samples(ours)
    items.of_own_samples(ours)  # once
    products: list[int] = []
    matmul = np.matmul
    rng = np.random.default_rng(0)

    def features(extractor: Any, sounds: list[Any]) -> tuple[Any, list[int]]:
        products.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "matmul", lambda one, other: products.append(one.shape[-2]) or matmul(one, other))
            made = extractor(sounds, sampling_rate=16000, return_tensors="pt")
        return made["input_features"][0][made["input_features_mask"][0]], [*products]

    for samples in (161, 320, 321, 1000, 5000, 16001):
        sound = (0.2 * rng.standard_normal(samples)).astype(np.float32)
        longer = np.zeros(20000, np.float32)
        alone, beside = features(ours, [sound]), features(ours, [sound, longer])
        assert_same_bits(beside[0], alone[0], f"{samples} samples")
        assert beside[1][0] == alone[1][0] == len(alone[0]) == (samples - 161) // 160 + 1
        assert features(plain, [sound, longer])[1][0] > len(alone[0]), "the negative control"
        assert_near(alone[0], features(plain, [sound])[0].double(), factor=2)


def test_what_nemotron_is_given_of_a_sound_follows_from_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes spectrograms of a request's sounds in one tensor, by compiled code."""
    import numpy as np
    from transformers import PretrainedConfig
    from vllm.model_executor.models import parakeet

    sizes = {"factor": 8, "conv_kernel_size": 3, "conv_stride": 2}
    sizes = {f"subsampling_{name}": size for name, size in sizes.items()}
    kind = parakeet.ParakeetExtractor
    extractor = kind(PretrainedConfig(num_mel_bins=80, sampling_rate=16000, **sizes))
    compiled = [name for name, made in vars(kind).items() if hasattr(made, "_torchdynamo_orig_callable")]
    for name in (*compiled, "__call__"):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # put back afterwards
    plain = {name: getattr(kind, name)._torchdynamo_orig_callable for name in compiled}
    rng, shapes = np.random.default_rng(0), set[tuple[int, ...]]()
    sounds = [(0.2 * rng.standard_normal(count)).astype(np.float32) for count in (1, 5333, 9999, 16000, 31 * 16000)]

    def features(call: list[Any]) -> list[list[torch.Tensor]]:
        made = extractor(call)
        rows, seen = made["input_audio_features"], made["feature_attention_mask"]
        assert rows.shape[:2] == seen.shape
        assert not rows[~seen].any()
        shapes.add((*rows.shape[1:],))
        clips = iter([clip[is_seen] for clip, is_seen in zip(rows, seen, strict=True)])
        return [[next(clips) for _ in range(count)] for count in made["audio_num_clips"]]

    def moved() -> list[int]:
        alone = [features([sound])[0] for sound in sounds]
        assert [[len(clip) for clip in clips] for clips in alone] == [[10], [33], [62], [100], [3000, 100]]
        found = zip(features(sounds), alone, strict=True)
        return [number for number, pair in enumerate(found) if not all(map(torch.equal, *pair))]

    with monkeypatch.context() as patch:
        for name, method in plain.items():
            patch.setattr(kind, name, method)
        expected = features([sounds[1]])[0][0]
        assert moved(), "the negative control"
        assert len(shapes) > 1, "the same"
        shapes.clear()
    for _ in range(2):
        items.of_own_sounds()
    assert {name: getattr(kind, name) for name in compiled} == plain
    assert moved() == []
    assert shapes == {(3001, 80)}
    assert_same_bits(features([sounds[1]])[0][0], expected, "as it is written")


def hearing() -> Any:
    """What vLLM's class of Nemotron 3 Nano Omni holds for sounds, with a small encoder of Transformers'."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = type("NemotronH_Nano_VL_V2", (torch.nn.Module,), {})()
    model.sound_encoder = torch.nn.Module()
    model.sound_encoder.encoder = ParakeetEncoder(ParakeetEncoderConfig(**sizes, subsampling_conv_channels=16)).eval()
    model._tower_model_names = ["sound_encoder"]
    return model.requires_grad_(False)


def test_a_clip_of_nemotrons_is_encoded_without_what_its_call_is_filled_with() -> None:
    """On a GPU the order of a softmax follows how long its row is."""
    at_most, alone = (SoftmaxReduction.of_device("cuda", rows, torch.float32) for rows in (375, 2))
    assert at_most.block != alone.block, "the negative control"
    model = hearing()
    encoder, lengths = model.sound_encoder.encoder, [10, 57, 300]
    clips = [torch.randn(length, 80) for length in lengths]
    filled = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    mask = torch.arange(300) < torch.tensor(lengths)[:, None]
    expected = hearing().double().sound_encoder.encoder(filled.double(), mask).last_hidden_state
    encoders.prepare(model)
    called: list[tuple[int, ...]] = []
    encoder.subsampling.register_forward_pre_hook(lambda layer, given: called.append((*given[0].shape,)))
    assert {*encoders.towers(model)} == {"sound_encoder", "sound_encoder.encoder"}
    assert encoders.problem_of_tower(encoder) is None
    assert [review._problem(layer) for layer in encoder.modules() if review._problem(layer)] == []
    with set_batch_invariant_mode():
        together = encoder(input_features=filled, attention_mask=mask).last_hidden_state
        assert called == [(1, length, 80) for length in lengths]
        for number, rows in enumerate((2, 8, 38)):
            found = encoder(input_features=clips[number][None], attention_mask=mask[number : number + 1, mask[number]])
            assert_same_bits(together[number, :rows], found.last_hidden_state[0], f"clip {number}")
            assert_near(together[number, :rows], expected[number, :rows], factor=8)
    encoder.config._attn_implementation = "sdpa"
    assert encoders.problem_of_tower(encoder) == "Transformers' attention is sdpa"


def glm_asr_processor(kind: Any) -> Any:
    """vLLM's processor of GLM-ASR, of a class, around Transformers' with chunks of two seconds."""
    import tokenizers
    from transformers import GlmAsrProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|pad|>": 0, "w": 1}, unk_token="w"))
    words.add_special_tokens(["<|pad|>"])
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
    inner = GlmAsrProcessor(extractor, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>"))

    def call_hf_processor(processor: Any, data: dict[str, Any], settings: dict[str, Any]) -> Any:
        return processor(**data, **settings)

    made = kind.__new__(kind)
    made.dummy_inputs = SimpleNamespace(get_dummy_text=lambda counts: "<|pad|>" * counts["audio"])
    made.info = SimpleNamespace(
        get_hf_processor=lambda **settings: inner,
        get_feature_extractor=lambda **settings: extractor,
        ctx=SimpleNamespace(call_hf_processor=call_hf_processor),
    )
    return made


def test_sounds_of_glm_asr_are_processed_by_themselves() -> None:
    """Of a request vLLM has those processed that it does not find among others': plainly, one is all that may be."""
    import numpy as np
    from vllm.exceptions import VLLMValidationError
    from vllm.model_executor.models.glmasr import GlmAsrMultiModalProcessor

    kind: Any = type("GlmAsrMultiModalProcessor", (GlmAsrMultiModalProcessor,), {})
    plain, ours = glm_asr_processor(GlmAsrMultiModalProcessor), glm_asr_processor(kind)
    items.each_sound_by_itself(ours)
    items.each_sound_by_itself(ours)  # once
    assert not hasattr(GlmAsrMultiModalProcessor._call_hf_processor, "__wrapped__")
    rng = np.random.default_rng(0)
    sounds = [(0.2 * rng.standard_normal(count)).astype(np.float32) for count in (961, 32000, 32001, 70000)]

    def processed(by: Any, *given: int, **settings: Any) -> Any:
        data = {"text": by._get_hf_mm_text({"audio": len(given)}), "audio": [sounds[number] for number in given]}
        return by._call_hf_processor(data, {"return_tensors": "pt", **settings})

    together, chunks = processed(ours, 0, 1, 2, 3), [1, 1, 2, 3]
    for name in ("input_features", "input_features_mask"):
        for number, part in enumerate(together[name].split(chunks)):
            assert_same_bits(part, processed(ours, number)[name], f"{name} of sound {number}")
            assert_same_bits(part, processed(plain, number)[name], f"{name} of sound {number} in plain vLLM")
    with pytest.raises(ValueError, match="1 text but 2 audios"):
        processed(plain, 0, 1)  # the negative control
    for given in ((0,), (0, 3)):
        with pytest.raises(VLLMValidationError, match="not filled to whole chunks"):
            processed(ours, *given, padding=True)
