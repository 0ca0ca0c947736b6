"""docs/contract.md has the table of operators that the package has."""

from tests.docs.documents import ROOT
from vllm_batch_invariant.aten import operators


def test_the_contract_lists_the_operators_as_the_package_does() -> None:
    assert f"\n{operators.table()}\n" in (ROOT / "docs" / "contract.md").read_text(), (
        "put what operators.table() returns into docs/contract.md"
    )
