"""At which numbers of rows DeepGEMM multiplies codes of e4m3; a stand-in by the definition is what can be had here."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune_cache
from vllm_batch_invariant.ops.linear.problem import ScaledProblem
from vllm_batch_invariant.ops.scaled_linear import deep_gemm as module
from vllm_batch_invariant.ops.scaled_linear import library, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.deep_gemm import DeepGemm
from vllm_batch_invariant.ops.scaled_linear.library import Library, operand_sets

PROBLEM = ScaledProblem(192, 512, torch.bfloat16, device=0)
CPU = torch.device("cpu")


def multiplied(x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
    """As the library takes its operands: scales of x have rows side by side, columns at multiples of 16 bytes."""
    (codes, scale), (weight, weight_scale) = x, w
    assert scale.stride(0) == 1
    assert scale.stride(1) % 4 == 0
    assert out.shape == (len(codes), len(weight))
    out.copy_(scaled_linear(codes, scale.contiguous(), weight, weight_scale, None, torch.bfloat16))


def with_a_unit_more(x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor], out: Any) -> None:
    multiplied(x, w, out)
    out.view(torch.int16)[-1, 3] += 1


class Operands:
    """Those of a tuner, and times that are given."""

    problem = PROBLEM

    def __init__(self, most: int, times: dict[int, float]) -> None:
        self.most, self.times = most, times
        self.sets = [(*one, scaled_linear(*one, None, torch.bfloat16)) for one in operand_sets(PROBLEM, most, CPU)]

    def cases(self, m: int, finishes: bool) -> Any:
        for codes, scale, weight, weight_scale, expected in self.sets:
            first = self.most - m
            yield (codes[first:], scale[first:], weight, weight_scale), expected[first:]

    def times_of(self, m: int, ways: dict[str, Callable[..., Any]]) -> dict[str, float]:
        return {"without": 10.0, "DeepGEMM": self.times[m]}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(DeepGemm, "_environment", lambda self, problem: {"gpu": "made up", "of": self._version})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)


def prepared(run: Any = multiplied, version: str = "1", **times: float) -> DeepGemm:
    found = DeepGemm()
    found.use(run, version)
    of_rows = {int(rows.removeprefix("m")): time for rows, time in times.items()}
    found.prepare(PROBLEM, of_rows, lambda *_: pytest.fail("run"), lambda most: Operands(most, of_rows))
    return found


def served(found: DeepGemm) -> list[int]:
    return [m for m in range(600) if found.serves(PROBLEM, m)]


def test_it_serves_the_numbers_of_rows_at_which_it_is_equal_and_faster() -> None:
    found = prepared(m48=9.0, m64=11.0, m33=5.0, m16=1.0)
    assert served(found) == [33, 48]


def test_another_bit_of_one_element_refuses_it() -> None:
    assert served(prepared(with_a_unit_more, m48=9.0)) == []


@pytest.mark.parametrize("error", [RuntimeError("NVCC compilation failed"), AssertionError()], ids=repr)
def test_a_compiler_that_is_absent_leaves_it_out(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise error

    assert served(prepared(broken, m48=9.0, m64=1.0)) == []
    assert caplog.text.count("DeepGEMM is left out") == 1


def test_what_was_found_is_kept_on_disk_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(m48=9.0, m64=11.0)
    monkeypatch.setattr(DeepGemm, "_measured", lambda *_: pytest.fail("measured again"))
    loaded: list[int] = []
    monkeypatch.setattr(DeepGemm, "_loads", lambda self, problem, m: loaded.append(m) or True)
    assert served(prepared(m48=9.0, m64=11.0)) == [48]
    assert loaded == [48]
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        prepared(version="2", m48=9.0)


@pytest.mark.parametrize("known", [True, None, 9, [], {}, {"serves": "false"}, {"serves": 1}], ids=repr)
def test_what_a_file_should_not_hold_is_measured_again(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"gpu": "made up", "of": "1"}
    autotune_cache.save(environment, {str(PROBLEM): {"48": known}})
    assert served(prepared(m48=11.0)) == []
    assert autotune_cache.load(environment)[str(PROBLEM)]["48"]["serves"] is False
    autotune_cache.save(environment, {str(PROBLEM): {"48": known}})
    assert served(prepared(m48=9.0)) == [48]


def test_no_more_is_tried_in_a_start_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.0)
    assert served(prepared(m48=9.0)) == []
    monkeypatch.setattr(module, "_SECONDS", 10.0)
    assert served(prepared(m48=9.0)) == [48]


@pytest.mark.parametrize(("m", "multiplied_by_it"), [(48, [48]), (47, None), (128, [64, 64]), (176, [64, 64, 48])])
def test_a_product_is_its_parts(
    m: int, multiplied_by_it: list[int] | None, cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    found = prepared(lambda x, w, out: rows.append(len(x[0])) or multiplied(x, w, out), m48=9.0, m64=9.0)
    monkeypatch.setattr(library, "deep_gemm", found)
    monkeypatch.setattr(library, "_LARGEST_M", 64)
    monkeypatch.setattr(library, "LEAST_M", 40)
    serving = Library()
    serving._tuned[PROBLEM] = {}
    given = next(operand_sets(PROBLEM, m, CPU))
    rows.clear()
    made = serving.product(*given, torch.bfloat16)
    if multiplied_by_it is None:
        assert made is None
    else:
        assert_same_bits(made, scaled_linear(*given, None, torch.bfloat16))
        assert rows == multiplied_by_it


def test_few_sizes_of_graphs_are_tried_those_of_most_use_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    found = DeepGemm()
    monkeypatch.setattr(found, "prepare", lambda problem, rows, served, operands: asked.extend(rows))
    monkeypatch.setattr(library, "deep_gemm", found)
    serving = Library()
    monkeypatch.setattr(serving, "_prepare_library", lambda *_: None)
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    serving.prepare(PROBLEM, 8192, sizes, lambda *_: pytest.fail("run"))
    usual = [512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 448, 384, 320, 192]
    assert asked == [8192, *usual]
    asked.clear()
    serving.prepare(PROBLEM, 16_384, (*sizes, 2304, 4096, 8192, 9216, 16_384), lambda *_: pytest.fail("run"))
    assert asked == [8192, *usual, 4096, 2304]
