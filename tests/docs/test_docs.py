"""The documents name what there is: every link, path, command, option and variable."""

import re
from pathlib import Path

import pytest

from scripts.demos import addition, batches, blocks, splits
from tests.docs.documents import ROOT, commands, help_of, of_command, problems
from tests.docs.documents import blocks as fenced
from vllm_batch_invariant import cli, envs

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "see").glob("*.md")))
TUNING = (ROOT / "docs" / "tuning.md").read_text()

MADE_UP = {
    "vllm-batch-invariant reproduce --model MODEL --made-up 3": "unrecognized arguments: --made-up",
    "vllm-batch-invariant check MODEL --quick --thorough": "not allowed with",
    "vllm-batch-invariant receipt make FILE --made-up": "unrecognized arguments: --made-up",
    "vllm-batch-invariant made-up": "no command made-up",
    "vllm-batch-invariant reproduce --model MODEL --serve-args=--made-up": "vLLM has no option --made-up",
    "python -m benchmarks.engine MODEL --providers made-up": "invalid choice: 'made-up'",
    "python -m benchmarks.made_up": "no module benchmarks.made_up",
    "python -m scripts.demos.addition --made-up": "unrecognized arguments: --made-up",
    "python scripts/made_up.py": "no scripts/made_up.py",
    "python -m vllm.entrypoints.openai.api_server --made-up": "vLLM has no option --made-up",
    "python -m vllm_batch_invariant.serve MODEL --made-up": "vLLM has no option --made-up",
    "uv made-up": "uv made-up is not known",
    "VLLM_BATCH_INVARIANT=1 vllm serve MODEL --no-made-up": "vLLM has no option --no-made-up",
    "pytest tests/made_up": "no tests/made_up",
    'pytest -m "not made_up"': "no marker made_up",
    "make made-up": "the Makefile has no made-up",
    "make test MADE_UP=1": "the Makefile has no MADE_UP",
    "pip install '.[made-up]'": "no extra made-up",
    "pip install 'vllm-batch-invariant[cuda]'": "no index has vllm-batch-invariant",
    "git clone https://made-up.example/made-up": "the project has none",
    ". made-up/bin/activate": "make install makes .venv",
    "made-up": "not a program",
}
MADE_UP_TEXT = {
    "[link](made-up.md)": "made-up.md, which is not there",
    "![picture](figures/made-up.svg)": "figures/made-up.svg, which is not there",
    "[link](contract.md#made-up)": "no such heading",
    "set `VLLM_BATCH_INVARIANT_MADE_UP=1`": "VLLM_BATCH_INVARIANT_MADE_UP is not a variable",
    "set VLLM_MADE_UP": "VLLM_MADE_UP is read by nothing",
    "`MADE_UP_NAME`": "MADE_UP_NAME is read by nothing",
    "pass `--made-up`": "vLLM has no option --made-up",
    "see `ops/{linear,made_up}/cuda.py`": "no ops/made_up/cuda.py",
    "```python\nfrom vllm_batch_invariant.compare import made_up\n```\n": "has no made_up",
    "```python\nfrom vllm_batch_invariant.trl import made_up\n```\n": "trl has no made_up",
    "```\nmake made-up\n```\n": "the Makefile has no made-up",
    "run `make made-up`": "the Makefile has no made-up",
    "```yaml\nsteps:\n  - run: make made-up\n```\n": "the Makefile has no made-up",
}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda document: document.name)
def test_all_that_a_document_names_exists(document: Path) -> None:
    assert problems(document, document.read_text()) == []


@pytest.mark.parametrize("command", MADE_UP)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert any(MADE_UP[command] in problem for problem in of_command(command))


@pytest.mark.parametrize("text", MADE_UP_TEXT)
def test_what_a_text_makes_up_is_found(text: str) -> None:
    assert any(MADE_UP_TEXT[text] in problem for problem in problems(ROOT / "docs" / "tuning.md", text))


def test_commands_are_read_from_blocks_and_from_the_text() -> None:
    text = (
        "```\nmake demo    # comment\n```\nRun `make test`, `make`.\n```python\nmake = 1\n```\n```text\nprinted\n```\n"
    )
    assert list(commands(text)) == ["make demo    # comment", "make test"]


def test_the_readme_links_every_document() -> None:
    """Those of docs/see by way of their first page."""
    text = DOCUMENTS[0].read_text() + (ROOT / "docs" / "see" / "index.md").read_text().replace("](", "](docs/see/")
    places = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS[1:]]
    assert [place for place in places if f"]({place})" not in text] == []


def test_the_readme_can_be_read_in_five_minutes() -> None:
    """Counted as ``wc -w`` counts."""
    assert len(DOCUMENTS[0].read_text().split()) < 1200


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "site" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    places = [path.relative_to(ROOT / "docs").as_posix() for path in DOCUMENTS[1:]]
    assert [place for place in places if not re.search(rf"- ([\w' ]+: )?{re.escape(place)}$", navigation, re.M)] == []


def test_every_figure_is_shown() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert [path.name for path in (ROOT / "docs" / "figures").iterdir() if f"figures/{path.name})" not in text] == []


def test_every_variable_and_option_is_in_the_page_on_tuning() -> None:
    helps = [help_of(command) for command in cli.COMMANDS]
    helps += [help_of("receipt", subcommand) for subcommand in ("make", "verify", "compare")]
    options = set(re.findall(r"--[a-z][a-z-]+[a-z]", "".join(helps))) - {"--help"}
    assert len(options) > 30
    assert {option for option in options if f"`{option}" not in TUNING} == set()
    assert {variable.name for variable in envs.VARIABLES if f"`{variable.name}`" not in TUNING} == set()


def test_what_demonstrations_print_is_shown_as_they_document_it() -> None:
    """``tests/test_demos.py`` compares their docstrings with what they print."""
    shown = [block for language, block in fenced((ROOT / "docs" / "how-it-works.md").read_text()) if language == "text"]
    documented = [demo.__doc__.replace("\n    ", "\n") for demo in (addition, blocks, batches, splits)]
    lines = [{line for line in text.splitlines() if line} for text in documented]
    assert [set(block.splitlines()) - {""} - known for block, known in zip(shown, lines, strict=True)] == [set()] * 4
