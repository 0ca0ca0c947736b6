"""A server of a model that embeds, or scores pairs, gives a text the same embedding and scores beside others."""

import string
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from vllm_batch_invariant.cli import main
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.harness.pooling import answer_in
from vllm_batch_invariant.verify.harness.server import serve
from vllm_batch_invariant.verify.outcome import Status
from vllm_batch_invariant.verify.receipt import Pooled, PooledReceipt
from vllm_batch_invariant.verify.receipt.record import number_of

pytestmark = [pytest.mark.server, pytest.mark.exhaustive]

TEXT = "A sum of floating-point numbers depends on the order of its additions. " * 9
OTHERS = [f"{number} " + "while and return " * (number % 40) for number in range(48)]
ASKED: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/pooling": lambda text: {"input": text, "task": "embed"},
    "/score": lambda text: {"text_1": "Which order?", "text_2": text},
    "/rerank": lambda text: {"query": "Which order?", "documents": [text, "none"]},
}
"""What is asked about a text, by route."""


@contextmanager
def served(model: Path, *arguments: str) -> Iterator[httpx.Client]:
    version = pytest.importorskip("vllm").__version__
    if not version.startswith(RAN.pooling["cuda" if torch.cuda.is_available() else "cpu"]):
        pytest.skip(f"pooling with vLLM {version} is refused")
    environment = {"VLLM_BATCH_INVARIANT": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        serve(str(model), [*arguments, "--max-model-len", "1024"], environment) as running,
        httpx.Client(base_url=running.base_url[:-3], trust_env=False, timeout=120) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    parts = "--hf-overrides", '{"is_matryoshka": true}'
    with served(model, "--runner", "pooling", "--convert", "embed", *parts) as http:
        yield http


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A BERT that scores pairs, whose tokens are letters."""
    if torch.cuda.is_available():
        pytest.skip("encoders have not run on a GPU")
    folder = tmp_path_factory.mktemp("bert")
    letters = [one for one in string.printable if not one.isspace() and not one.isupper()]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{one}" for one in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=1024).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=384, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=6,
        max_position_embeddings=1024, initializer_range=0.2, num_labels=1,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    with served(folder, "--dtype", "float32") as http:
        yield http


@pytest.mark.parametrize("route", ASKED)
def test_a_text_gets_the_same_alone_and_beside_others(route: str, client: httpx.Client) -> None:
    compare(route, client)


def test_the_command_finds_embeddings_equal(client: httpx.Client) -> None:
    reproduce(client, "embed", "--dimensions", "100")


@pytest.mark.parametrize("task", ["score", "classify"])
def test_the_command_finds_scores_and_classes_equal(task: str, cross_encoder: httpx.Client) -> None:
    reproduce(cross_encoder, task, "--no-activation")


def reproduce(client: httpx.Client, task: str, *arguments: str) -> None:
    url = str(client.base_url)
    load = ("--samples", "40", "--concurrency", "16", "--prompt", "which sum")
    assert main(["reproduce", "--task", task, "--base-url", url, *load, *arguments]) == Status.REPRODUCIBLE


@pytest.mark.parametrize("arguments", [("embed", "--dimensions", "100"), ("embed", "--no-activation"), ("score",)])
def test_receipts_of_embeddings_and_their_cosines_are_equal_among_others(
    arguments: tuple[str, ...], client: httpx.Client, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify_receipts(client, model, tmp_path, capsys, *arguments)


@pytest.mark.parametrize("task", ["score", "classify"])
def test_receipts_of_scores_and_classes_are_equal_among_others(
    task: str, cross_encoder: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify_receipts(cross_encoder, None, tmp_path, capsys, task)


def verify_receipts(
    client: httpx.Client, model: Path | None, folder: Path, capsys: pytest.CaptureFixture[str], task: str, *more: str
) -> None:
    """A receipt of a server is equal there, a flipped bit is found, and a private one is equal with its text."""
    server = ["--base-url", str(client.base_url), *(("--model-files", str(model)) if model else ())]
    text = ["--prompt", "which sum of numbers?"]
    made, private, changed = (folder / f"{name}.json" for name in ("made", "private", "changed"))
    for path, option in ((made, ()), (private, ("--private",))):
        assert main(["receipt", "make", str(path), *server, "--task", task, *text, *more, *option]) == 0
    capsys.readouterr()
    assert main(["receipt", "verify", str(made), *server, "--concurrent", "6"]) == 0
    said = capsys.readouterr().out
    assert "engines: nothing that decides bits differs" in said or model is None
    assert "computed again 8 times with" in said.splitlines()[-1]
    assert main(["receipt", "verify", str(private), *server, *text]) == 0
    assert main(["receipt", "compare", str(made), str(private)]) == 0
    kept = PooledReceipt.load(made)
    values = [*map(number_of, kept.pooled.values[:-1]), number_of(f"{int(kept.pooled.values[-1], 16) ^ 1:08x}")]
    replace(kept, pooled=Pooled.of(values)).save(changed)
    assert main(["receipt", "verify", str(changed), *server, "--concurrent", "2"]) == 1
    assert f"differs: value {len(values) - 1} is 0x{kept.pooled.values[-1]} " in capsys.readouterr().out


def test_an_embedding_as_bytes_has_the_bits_of_its_numbers(client: httpx.Client) -> None:
    def asked(encoding: str) -> Any:
        body = {"input": TEXT, "encoding_format": encoding}
        return client.post("/v1/embeddings", json=body).json()

    numbers = asked("float")["data"][0]["embedding"]
    answer = answer_in("embed", asked("base64"))
    assert Pooled.of(numbers) == Pooled.of(value for place in range(len(numbers)) for value in answer.values(place))


@pytest.mark.parametrize("route", ["/score", "/rerank"])
def test_a_pair_has_the_same_score_alone_and_beside_others(route: str, cross_encoder: httpx.Client) -> None:
    compare(route, cross_encoder)


def compare(route: str, client: httpx.Client) -> None:
    def asked(text: str) -> Any:
        answer = client.post(route, json=ASKED[route](text))
        assert answer.status_code == 200, answer.text
        return answer.json().get("data") or answer.json()["results"]

    alone = asked(TEXT)
    with ThreadPoolExecutor(len(OTHERS) + 1) as pool:
        given = list(pool.map(asked, [*OTHERS[:24], TEXT, *OTHERS[24:]]))
    assert given[24] == alone
    assert given[23] != alone


def test_a_server_that_embeds_says_what_it_promises(client: httpx.Client) -> None:
    said = client.get("/v1/batch_invariant").json()
    assert '"seq_pooling_type": "LAST"' in said["engine"]["pooler_config"], said
