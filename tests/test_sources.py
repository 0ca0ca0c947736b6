"""The digest of the package's sources follows what a source says, not how it is written, and costs a start little."""

import ast
import compileall
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_batch_invariant import provenance, sources
from vllm_batch_invariant.sources import digest, digest_of

KERNEL = '''"""About the kernel."""
import math

LANES = 64
"""Elements that are added at once."""


def add(x, *, factor=1.0):
    """Doubles."""
    # twice
    return {"sum": x + x * factor, "root": math.sqrt(x)}
'''


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a folder of two modules and one beside it."""
    (tmp_path / "package" / "ops" / "norm").mkdir(parents=True)
    for name in ("ops/__init__.py", "ops/norm/kernel.py", "beside.py"):
        (tmp_path / "package" / name).write_text(KERNEL)
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("# twice", "# two times\n", True),
        ("    # twice\n", "", True),
        ("Doubles.", "It doubles.", True),
        ('    """Doubles."""\n', "", True),
        ("that are added at once", "of a lane", True),
        ("x + x * factor", "(x\n        + x*factor)", True),
        ('"sum"', "'sum'", True),
        ("math.sqrt(x)}", "math.sqrt(x),\n    }", True),
        ("64", "32", False),
        ("1.0", "1", False),
        ("x + x * factor", "x * factor + x", False),
        ("x + x * factor", "(x + x) * factor", False),
        ("factor=1.0", "factor=None", False),
        ("*, ", "", False),
        ("import math", "import cmath as math", False),
        ("def add(", "@jit\ndef add(", False),
        ('"root"', '"roots"', False),
        ('    """Doubles."""\n', "    return x\n", False),
    ],
)
def test_it_changes_with_what_a_source_says_and_not_with_how_it_is_written(
    package: Path, before: str, after: str, same: bool
) -> None:
    was = digest_of(package, "ops")
    assert before in KERNEL
    (package / "ops/norm/kernel.py").write_text(KERNEL.replace(before, after, 1))
    assert (digest_of(package, "ops") == was) == same


def test_it_is_of_the_modules_that_are_named_and_of_their_names(package: Path) -> None:
    was = digest_of(package, "ops"), digest_of(package, "ops", "beside"), digest_of(package, "ops/norm/kernel")
    assert len({*was}) == 3
    assert digest_of(package, "beside", "ops", "ops/norm") == was[1], "in any order, each once"
    (package / "beside.py").write_text("")
    assert digest_of(package, "ops") == was[0]
    assert digest_of(package, "ops", "beside") != was[1]
    (package / "ops/norm/kernel.py").rename(package / "ops/norm/another.py")
    assert digest_of(package, "ops") != was[0]
    with pytest.raises(ModuleNotFoundError, match="no sources or compiled modules of ops/norm/kernel"):
        digest_of(package, "ops/norm/kernel")
    with pytest.raises(ModuleNotFoundError):
        digest("ops/none")


def test_an_archive_has_the_digest_of_the_folder(package: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for path in sorted(package.rglob("*.py")):
            archive.write(path, path.relative_to(tmp_path))
    inside = zipfile.Path(tmp_path / "archive.zip", "package/")
    assert digest_of(inside, "ops", "beside") == digest_of(package, "ops", "beside")


def test_without_sources_it_is_of_the_compiled_modules(package: Path) -> None:
    def compiled(constant: int) -> str:
        source = package / "ops/norm/kernel.py"
        source.write_text(KERNEL.replace("64", str(constant)))
        assert compileall.compile_dir(package, quiet=2, legacy=True, force=True)
        source.unlink()
        return digest_of(package, "ops/norm")

    assert compiled(64) == compiled(64)
    assert compiled(64) != compiled(32)
    (package / "ops/norm/kernel.py").write_text(KERNEL)
    assert digest_of(package, "ops/norm") != compiled(64), "the source comes first"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was parsed."""
    found: list[bytes] = []
    parse: Callable[[bytes], ast.Module] = ast.parse
    monkeypatch.setattr(sources.ast, "parse", lambda content: (found.append(content), parse(content))[1])
    return found


def test_a_file_is_parsed_once_until_it_changes(package: Path, parsed: list[bytes]) -> None:
    first = digest_of(package, "ops", "beside")
    assert len(parsed) == 1, "three equal files"
    assert digest_of(package, "ops", "beside") == first
    assert len(parsed) == 1
    (package / "beside.py").write_text(KERNEL.replace("64", "32"))
    assert digest_of(package, "ops", "beside") != first
    assert len(parsed) == 2


@pytest.mark.parametrize("broken", ["[]", "{}", '{"content": [], "sha256": ""}'])
def test_what_is_kept_is_no_need(package: Path, parsed: list[bytes], broken: str) -> None:
    first = digest_of(package, "ops")
    path = sources.kept_file.path_of(sources._KEPT)
    path.write_text(broken)
    assert digest_of(package, "ops") == first
    assert len(parsed) == 2
    shutil.rmtree(path.parent)
    path.parent.write_text("no folder")
    assert digest_of(package, "ops") == first


def test_a_start_where_no_file_changed_takes_milliseconds() -> None:
    digest_of(sources.files("vllm_batch_invariant"), *provenance._DECIDING)
    before = time.process_time()
    digest_of(sources.files("vllm_batch_invariant"), *provenance._DECIDING)
    assert time.process_time() - before < 0.15


def test_what_a_tree_does_not_have_is_not_written() -> None:
    """Such as the parameters of types, which Python has had since 3.12."""
    [function] = ast.parse("def f(): return None").body
    was = sources.syntax(function)
    function._fields = (*function._fields, "type_params", "of_a_later_python")
    function.type_params = []
    assert sources.syntax(function) == was
    function.type_params = [ast.Name("T")]
    assert sources.syntax(function) != was
