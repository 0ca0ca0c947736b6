"""The demonstrations run, and what they say holds on this machine."""

from types import ModuleType

import pytest
import torch

from scripts.demos import addition, batches, blocks, splits


def printed(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a demonstration prints, without empty ones."""
    demo.main(["--device", "cpu"] if demo is not addition else [])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]


@pytest.mark.parametrize("demo", [addition, blocks], ids=lambda demo: demo.__name__)
def test_what_ieee_754_defines_is_printed_as_documented(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(demo, capsys)
    assert len(lines) > 5
    assert [line for line in lines if f"\n    {line}\n" not in demo.__doc__] == []


def test_the_block_and_split_k_move_bits_and_the_tile_does_not() -> None:
    assert len(set(blocks.sums(torch.float32).values())) == len(blocks.BLOCKS)
    by_tile, by_splits = blocks.moved(torch.float32)
    assert set(by_tile.values()) == {0}
    assert by_splits.pop(1) == 0
    assert all(by_splits.values())


def test_in_the_mode_a_row_has_one_result_in_every_batch(capsys: pytest.CaptureFixture[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches.main(["--device", device])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(batches.operations(device))
    assert {row[3].strip() for row in rows} == {"1"}
    assert max(int(row[2]) for row in rows) > 1


def test_splits_of_a_fixed_size_move_no_bit_and_a_fixed_number_does(capsys: pytest.CaptureFixture[str]) -> None:
    by_number, by_size = splits.results().values()
    assert all(torch.equal(by_size[keys], by_size[splits.KEYS[0]]) for keys in splits.KEYS)
    assert not any(torch.equal(by_number[keys], by_number[splits.KEYS[0]]) for keys in splits.KEYS[1:])
    torch.testing.assert_close(by_number[4096], by_size[4096])
    assert len(printed(splits, capsys)) == len(splits.KEYS) + 3
