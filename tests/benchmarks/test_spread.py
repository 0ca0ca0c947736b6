"""What the samples of a measurement become."""

from benchmarks.spread import Spread


def test_a_spread_and_its_rate() -> None:
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert spread == Spread(p50=3.5, p20=2.0, p80=5.0)
    assert spread.rate(10) == Spread(p50=10 / 3.5, p20=2.0, p80=5.0)
