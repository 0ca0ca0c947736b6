"""A real server of Whisper answers a recording with the same words and times, whatever it transcribes beside it."""

import io
import os
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.engine import audio, multimodal
from tests.engine.engines import PATHS
from tests.fakes import soundfile
from vllm_batch_invariant.verify.harness.server import Server, serve

pytestmark = [pytest.mark.server, pytest.mark.exhaustive]

LENGTHS = (1, 2, 3, 5, 8, 13)
"""Tenths of seconds of recordings, thrice."""
RECORDINGS = [(tenths * audio.RATE // 10, seed) for seed in range(3) for tenths in LENGTHS]
FORMS: dict[str, dict[str, str]] = {
    "words": {"response_format": "json"},
    "times": {"response_format": "verbose_json"},
    "beams": {"response_format": "json", "use_beam_search": "true", "n": "3", "max_completion_tokens": "6"},
}
"""Of answers."""
LONG = (15 * audio.RATE, 9)
"""That the server cuts where it is quiet: the model hears six seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if torch.cuda.is_available():
        pytest.skip("cross attention has not run here")
    folder, path = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("path")
    audio.save(audio.whisper(), torch.float32, folder)
    python_path = os.pathsep.join([*multimodal.python_path(path), *soundfile.where_missing(path), PATHS])
    arguments = ["--max-model-len", "256", "--max-num-batched-tokens", "2048", "--dtype", "float32"]
    variables = {"VLLM_BATCH_INVARIANT": "1", "PYTHONPATH": python_path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serve(str(folder), [*arguments, "--skip-mm-profiling"], variables) as running:
        yield running


def wav(samples: int, seed: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(audio.RATE)
        made.writeframes((audio.sound(samples, seed) * 20000).astype(np.int16).tobytes())
    return file.getvalue()


def answers(
    server: Server, recordings: Sequence[tuple[int, int]], form: str = "words", task: str = "transcriptions"
) -> list[dict[str, Any]]:
    """What each gets, all at once."""

    def ask(recording: tuple[int, int]) -> dict[str, Any]:
        answer = httpx.post(
            f"{server.base_url}/audio/{task}",
            files={"file": ("recording.wav", wav(*recording), "audio/wav")},
            data={"language": "en", "temperature": "0", "max_completion_tokens": "24"} | FORMS[form],
            timeout=600,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(len(recordings)) as pool:
        return list(pool.map(ask, recordings))


@pytest.mark.parametrize("form", FORMS)
def test_a_recording_has_the_same_answer_beside_others(form: str, server: Server) -> None:
    recordings = RECORDINGS[:7] if form == "beams" else RECORDINGS
    together = answers(server, [*recordings, LONG], form)
    alone = [answers(server, [one], form)[0] for one in (*recordings[:3], LONG)]
    assert alone == [*together[:3], together[-1]]
    assert len({answer["text"] for answer in together}) > 1, "the model does not listen"


def test_a_translation_is_another_task(server: Server) -> None:
    [one], [other] = answers(server, RECORDINGS[:1]), answers(server, RECORDINGS[:1], task="translations")
    assert one["text"] != other["text"]
    assert answers(server, RECORDINGS[:4], task="translations")[0] == other


def test_the_server_says_what_it_is(server: Server) -> None:
    found = httpx.get(f"{server.base_url}/batch_invariant", trust_env=False).json()
    assert "batch-invariant" in found["fingerprint"]
    assert found["witness"] == ""
    assert "No witness: the model answers about audio" in server.log.read_text()
