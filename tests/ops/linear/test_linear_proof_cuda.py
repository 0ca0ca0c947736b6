"""Certificates of products: what has the bits of the chain passes, what does not is refused, named and not used."""

from itertools import product

import pytest
import torch

from tests.assertions import ROW_COUNTS, assert_same_bits
from tests.ops.linear.cases import HALVES, KINDS, chain, operands, turned
from vllm_batch_invariant.ops.linear import linear, mm, prepare

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune, autotune_cache, cuda, triton_gemm
from vllm_batch_invariant.ops.linear.autotune import LIMITS, Certifier, Inconsistent
from vllm_batch_invariant.ops.linear.problem import Signature, signature_of
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES, gpu, narrow_tiles

NARROW = ((896, 4864), (768, 4096), (1280, 8192))
"""(N, K) for which a library likes to split K."""
LAYOUTS = [
    (torch.bfloat16, True, True),
    (torch.bfloat16, True, False),
    (torch.bfloat16, False, True),
    (torch.bfloat16, False, False),
    (torch.float16, True, True),
]
"""dtype; whether K is the inner side of a and of b."""
WORKSPACE = 64 << 20


@pytest.fixture
def cublaslt():
    pytest.importorskip("nvmath")
    from vllm_batch_invariant.ops.linear import cublaslt

    return cublaslt


def forget() -> None:
    """What a new process does not know."""
    cuda._certified.clear()
    cuda._stored.cache_clear()
    cuda._plans.clear()


@pytest.fixture
def no_measuring(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    return lambda: monkeypatch.setattr(autotune, "certify", refuse)


def entries(x, weight, bias=None) -> dict[int, autotune.Entry]:
    return cuda.entries(signature_of(x, weight.t(), bias))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("columns", "depth"), NARROW)
def test_an_algorithm_that_splits_k_does_not_agree(columns, depth, dtype, cublaslt):
    signature = Signature(columns, depth, dtype, bias=False, device=0)
    certifier = Certifier(signature, cublaslt.Products(signature), most=64)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    splitting = 0
    for rows in (1, 8, 16, 33, 64):
        for algorithm in certifier.products.algorithms(rows, 8, WORKSPACE):
            if algorithm.split > 1:
                splitting += 1
                assert not certifier.agrees(certifier.by(algorithm, workspace), (rows,)), f"{rows} rows, {algorithm}"
    assert splitting, "the heuristic named none"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "a_by_rows", "b_by_columns"), LAYOUTS)
def test_every_algorithm_that_does_not_split_agrees(dtype, a_by_rows, b_by_columns, bias, cublaslt):
    shapes = [*NARROW, (2560, 2048)] if a_by_rows and b_by_columns else [(768, 2048)]
    for columns, depth in shapes:
        signature = Signature(columns, depth, dtype, bias, 0, a_by_rows, b_by_columns)
        certifier = Certifier(signature, cublaslt.Products(signature), most=4096)
        named = 0
        for limit in (8, 16, 24, 64, 256, 1024, 4096):
            counts = certifier.counts(limit, ())
            for algorithm in certifier.products.algorithms(limit, 8):
                assert algorithm.split == 1
                assert certifier.agrees(certifier.by(algorithm), counts), f"{counts} rows, {signature}, {algorithm}"
                named += 1
        assert named >= 7


def test_one_differing_bit_in_the_last_element_is_seen(cublaslt):
    signature = Signature(768, 1024, torch.bfloat16, bias=True, device=0)
    certifier = Certifier(signature, cublaslt.Products(signature), most=256)

    def off_by_one(a: torch.Tensor) -> torch.Tensor:
        out = certifier.by_triton(a)
        out.view(torch.int16)[-1, -1] += 1
        return out

    counts = certifier.counts(256, ())
    assert certifier.agrees(certifier.by_triton, counts)
    assert not certifier.agrees(off_by_one, counts)
    assert not certifier.agrees(lambda a: off_by_one(a) if len(a) == counts[1] else certifier.by_triton(a), counts)


def test_a_split_shows_in_cancelling_operands_and_hides_in_random_ones():
    moved = {}
    for kind in KINDS:
        x, weight, _ = operands(kind, 16, 768, 4096, torch.bfloat16)
        a, b = x.view(16, 2, 2048).transpose(0, 1), weight.view(768, 2, 2048).permute(1, 2, 0)
        halves = [triton_gemm.accumulate(half_a, half_b) for half_a, half_b in zip(a, b, strict=True)]
        split = (halves[0] + halves[1]).bfloat16()
        moved[kind] = (split != chain(x, weight)).double().mean().item()
    assert moved["cancelling"] > 0.9
    assert moved["random"] < 0.05


@pytest.mark.parametrize("depth", [16, 17, 100, 4096])
@pytest.mark.parametrize("dtype", HALVES)
def test_cancelling_operands_have_a_product_of_zero(dtype, depth):
    x, weight, _ = operands("cancelling", 33, 40, depth, dtype)
    assert (x.double() @ weight.double().t()).abs().max() < 1e-10
    assert chain(x, weight).abs().max() < 1e-2


def test_entries_outlive_the_process(uncertified, no_measuring, cublaslt):
    x, weight, bias = operands("cancelling", 100, 384, 1024, torch.bfloat16)
    prepare(weight, 100, bias=True, sizes=(3, 100))
    made = dict(entries(x, weight, bias))
    assert sorted(made) == [limit for limit in LIMITS if limit <= 128]
    assert {3, 100} < {count for entry in made.values() for count in entry.checked}
    assert any(entry.algorithm for entry in made.values())
    forget()
    no_measuring()
    prepare(weight, 100, bias=True, sizes=(3, 100))
    assert entries(x, weight, bias) == made
    assert cuda.known(0)[1] == {str(signature_of(x, weight.t(), bias)): made}
    for rows in (1, 3, 100):
        assert_same_bits(linear(x[:rows], weight, bias), chain(x, weight, bias)[:rows], f"{rows} rows")


def test_entries_of_another_environment_are_not_read(uncertified, monkeypatch):
    x, weight, _ = operands("cancelling", 8, 384, 1024, torch.bfloat16)
    prepare(weight, 8)
    assert entries(x, weight)
    before = cuda._environment(0)
    for key in before:
        forget()
        monkeypatch.setattr(cuda, "_environment", lambda _, key=key: {**before, key: "another"})
        assert not entries(x, weight), key
    forget()
    monkeypatch.setattr(cuda, "_environment", lambda _: before)
    assert entries(x, weight)


def test_the_environment_names_what_a_measurement_is_true_for():
    found = autotune_cache.environment(0, "1.2.3")
    assert torch.cuda.get_device_name(0) in found["gpu"]
    assert found["cublaslt"] == "1.2.3"
    assert found["torch"] == torch.__version__
    assert found["driver"]


def test_a_cache_that_cannot_be_written_or_read_is_harmless(uncertified, monkeypatch, tmp_path):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    expected = chain(x, weight, bias)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    prepare(weight, 40, bias=True)
    assert_same_bits(linear(x, weight, bias), expected)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    path = autotune_cache._path(cuda._environment(0))
    path.parent.mkdir()
    path.write_text("{ not JSON")
    prepare(weight, 40, bias=True)
    assert_same_bits(linear(x, weight, bias), expected)
    assert autotune_cache.load(cuda._environment(0)), "it was written anew"


def test_a_wrong_schedule_is_refused_named_and_not_used(uncertified, cublaslt, monkeypatch, log):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    run, uses = cublaslt.Products.run, []

    def off_by_one(self, algorithm, a, b, bias, out, *rest, **strides) -> None:
        uses.append(len(a))
        run(self, algorithm, a, b, bias, out, *rest, **strides)
        out.view(torch.int16)[-1, -1] += 1

    monkeypatch.setattr(cublaslt.Products, "run", off_by_one)
    prepare(weight, 64, bias=True)
    certified = entries(x, weight, bias)
    for limit, entry in certified.items():
        assert entry.algorithm is None
        assert entry.refused, limit
        for about in entry.refused:
            assert f"{about} is not used for N=384 K=1024 bfloat16 bias, up to {limit} rows" in log.text
    uses.clear()
    for rows in range(1, 41):
        assert_same_bits(linear(x[:rows], weight, bias), chain(x, weight, bias)[:rows], f"{rows} rows")
    assert not uses


def test_only_split_schedules_leave_a_product_to_triton(uncertified, cublaslt, monkeypatch, log):
    x, weight, _ = operands("cancelling", 40, 896, 4864, torch.bfloat16)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    algorithms, run = cublaslt.Products.algorithms, cublaslt.Products.run
    asked = []

    def splitting(self, rows, most, workspace=0):
        found = [one for one in algorithms(self, rows, 8, WORKSPACE) if one.split > 1]
        asked.extend(one.about for one in found)
        return found

    monkeypatch.setattr(cublaslt.Products, "algorithms", splitting)
    monkeypatch.setattr(cublaslt.Products, "run", lambda self, *given, **_: run(self, *given[:5], workspace))
    prepare(weight, 64)
    assert asked, "the heuristic named none"
    assert all(entry.algorithm is None for entry in entries(x, weight).values())
    assert [about for entry in entries(x, weight).values() for about in entry.refused] == asked
    assert all(f"{about} is not used" in log.text for about in asked)
    for rows in (1, 7, 8, 9, 40):
        assert_same_bits(linear(x[:rows], weight), chain(x, weight)[:rows], f"{rows} rows")


def test_the_fastest_schedule_that_agrees_is_used(uncertified, monkeypatch, cublaslt):
    monkeypatch.setattr(cuda, "_TUNING_SECONDS", 30.0)
    x, weight, _ = operands("cancelling", 300, 896, 4864, torch.bfloat16)
    prepare(weight, 256, sizes=(1, 100))
    for limit, entry in entries(x, weight).items():
        if limit <= 256:
            times = entry.microseconds
            timed = {"cublaslt", "triton", *(["gluon"] if narrow_tiles(limit, 896, gpu(0)) else [])}
            assert set(times) == timed, limit
            assert all(0 < time < 1000 for time in times.values())
            if not entry.refused:
                costs = {**times, "cublaslt": times["cublaslt"] * autotune._TRITON_GAIN}
                assert costs[entry.served_by.lower()] == min(costs.values()), limit
    whole = chain(x, weight)
    for rows in (count for count in ROW_COUNTS if count <= 300):
        assert_same_bits(linear(x[:rows], weight), whole[:rows], f"{rows} rows")


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_every_narrow_tile_agrees(bias, dtype):
    for columns, depth in (*NARROW, (2048, 11008)):
        certifier = Certifier(Signature(columns, depth, dtype, bias, device=0), None, most=128)
        for limit, tile in product((8, 16, 24, 64, 128), NARROW_TILES):
            assert certifier.agrees(certifier.by(tile), certifier.counts(limit, ())), f"{columns} {limit} {tile}"


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("tile", NARROW_TILES, ids=lambda tile: tile.about)
def test_a_narrow_tile_that_won_serves_also_in_a_graph(tile, uncertified, cublaslt, monkeypatch):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    prepare(weight, 64, bias=True)
    for limit, entry in entries(x, weight, bias).items():
        entries(x, weight, bias)[limit] = autotune.Entry(None, entry.checked, (), {}, tile)
    launch, served = triton_gemm.by_narrow_tile, []
    monkeypatch.setattr(triton_gemm, "by_narrow_tile", lambda a, *given: served.append(len(a)) or launch(a, *given))
    expected = chain(x, weight, bias)
    for rows in range(1, 41):
        assert_same_bits(linear(x[:rows], weight, bias), expected[:rows], f"{rows} rows")
    assert served == [*range(1, 41)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x[:33], weight, bias)
    x.copy_(x.flip(0))
    graph.replay()
    assert_same_bits(out, expected.flip(0)[:33])
    assert served[-1] == 33


def test_a_product_is_certified_at_its_third_use_in_a_range(uncertified, cublaslt):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    whole = chain(x, weight, bias)
    for rows, certified in ((5, []), (1, []), (40, []), (8, [8]), (8, [8]), (33, [8]), (40, [8, 48])):
        assert_same_bits(linear(x[:rows], weight, bias), whole[:rows], f"{rows} rows")
        assert sorted(entries(x, weight, bias)) == certified, f"after {rows} rows"


@pytest.mark.parametrize("prepared", [False, True])
def test_without_memory_to_certify_a_product_is_left_to_triton(prepared, uncertified, cublaslt, monkeypatch, log):
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "cancelling", exhausted)
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    if prepared:
        prepare(weight, 64, bias=True)
    for use in range(5):
        assert_same_bits(linear(x, weight, bias), chain(x, weight, bias), f"use {use}")
    assert not entries(x, weight, bias)
    assert "left to Triton: no memory" in log.text


def test_a_chain_that_follows_the_number_of_rows_is_an_error(uncertified, monkeypatch):
    x, weight, _ = operands("cancelling", 8, 384, 1024, torch.bfloat16)
    stock = triton_gemm.mm

    def varying(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return stock(a, b, bias) if len(a) != 5 else stock(a.flip(1), b.flip(0), bias)

    monkeypatch.setattr(triton_gemm, "mm", varying)
    with pytest.raises(Inconsistent, match=r"N=384 K=1024 bfloat16 has other bits at one of \(1, 5, 8\) rows"):
        prepare(weight, 8)
    assert not entries(x, weight)


def test_an_algorithm_refused_for_some_rows_leaves_them_to_triton(uncertified, cublaslt, monkeypatch):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    prepare(weight, 64, bias=True)
    refused = []

    def refuse(self, algorithm, a, *_: object, **__: object) -> None:
        refused.append(len(a))
        raise cublaslt.Error(15)

    monkeypatch.setattr(cublaslt.Products, "run", refuse)
    for rows in (1, 13, 40):
        assert_same_bits(linear(x[:rows], weight, bias), chain(x, weight, bias)[:rows], f"{rows} rows")
    assert refused == [1, 13, 40]


def test_the_setting_leaves_everything_to_triton(uncertified, without_cublaslt, monkeypatch):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    if cuda.cublaslt:
        for name in ("__init__", "run", "algorithms"):
            monkeypatch.setattr(cuda.cublaslt.Products, name, lambda *_, **__: pytest.fail("cuBLASLt was used"))
    prepare(weight, 64, bias=True)
    assert all(entry.algorithm is None for entry in entries(x, weight, bias).values())
    for rows in range(1, 41):
        assert_same_bits(linear(x[:rows], weight, bias), chain(x, weight, bias)[:rows], f"{rows} rows")
    assert cuda._environment(0)["cublaslt"] == "not used"


@pytest.mark.parametrize(("dtype", "a_by_rows", "b_by_columns"), LAYOUTS)
def test_every_layout_is_certified_and_served(dtype, a_by_rows, b_by_columns, uncertified, cublaslt, monkeypatch):
    run, uses = cublaslt.Products.run, []
    x, weight, bias = operands("cancelling", 256, 384, 1024, dtype)
    a, b = turned(x, not a_by_rows), turned(weight, not b_by_columns).t()
    expected = chain(x, weight, bias)
    triton_gemm.mm(a[:64], b, bias)
    for use in range(4):
        assert_same_bits(mm(a[:64], b, bias), expected[:64], f"use {use}")
    entry = cuda.entries(signature_of(a, b, bias))[64]
    assert entry.algorithm, f"no algorithm of cuBLASLt passes: {entry.refused}"
    monkeypatch.setattr(cublaslt.Products, "run", lambda *given, **strides: uses.append(1) or run(*given, **strides))
    for rows in (49, 50, 56, 60, 63, 64):
        assert_same_bits(mm(a[:rows], b, bias), expected[:rows], f"{rows} rows")
    assert len(uses) == 6


def test_the_heuristic_is_asked_for_no_split(cublaslt):
    for (columns, depth), rows in product(NARROW, (1, 16, 64, 512)):
        products = cublaslt.Products(Signature(columns, depth, torch.bfloat16, bias=False, device=0))
        found = products.algorithms(rows, 8)
        assert 1 <= len(found) <= 8
        assert {algorithm.split for algorithm in found} == {1}
        assert len({algorithm.opaque for algorithm in found}) == len(found)
        assert len(found[0].opaque) == 64
