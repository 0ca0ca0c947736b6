"""What is looked for in assembly is found in it."""

import pytest

pytest.importorskip("triton")

from tests.ops.compiled_kernels import promotions, reads_before_wait, waits_for_each

LOOP = """
        /*2fd0*/ HGMMA.64x16x16.F32.BF16 R24, R64, gdesc[UR16], R24, gsb0 ;
        /*3530*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*4310*/ @!P1 BRA 0x2710 ;
"""
ROUNDED = "        /*4340*/ F2FP.BF16.F32.PACK_AB R53, R31, R30 ;\n"
ANOTHER = "        /*4350*/ IMAD R2, R87, UR10, R0.reuse ;\n"
TWO = """
        /*2970*/ QGMMA.64x16x32.F32.E4M3.E4M3 R32, gdesc[UR12], RZ, !UPT, gsb0 ;
        /*2a30*/ QGMMA.64x16x32.F32.E4M3.E4M3 R24, gdesc[UR16], RZ, !UPT ;
        /*2a40*/ QGMMA.64x16x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24, gsb0 ;
"""
WAIT_FOR_FIRST = "        /*2a90*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"
PROMOTED = "        /*2ab0*/ FFMA R50, R{}, R46, R41 ;\n"
WAIT = "        /*43e0*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"


def test_accumulators_that_are_read_before_the_last_wait_are_found() -> None:
    assert reads_before_wait(LOOP + ANOTHER + ROUNDED + WAIT)
    assert not reads_before_wait(LOOP + ANOTHER + WAIT + ROUNDED)


def test_wgmmas_that_wait_for_one_another_are_found() -> None:
    assert waits_for_each(LOOP.replace("0x1", "0x0"))
    assert not waits_for_each(LOOP + LOOP + WAIT)


def test_sums_of_e4m3_that_are_promoted_more_or_less_often_than_every_128_are_found() -> None:
    product = "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%r1};\n"
    added = 8 * "fma.rn.f32 %r1, %r2, %r3, %r4;\n"
    assert promotions(4 * product + added) == 1
    assert promotions(4 * (product + added)) == 4
    assert promotions(8 * product + added) == 0.5
    assert promotions(4 * product + added + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1};") == 0


def test_of_two_accumulators_the_finished_one_may_be_read() -> None:
    first, second = PROMOTED.format(39), PROMOTED.format(24)
    assert reads_before_wait(TWO + first + WAIT_FOR_FIRST)
    assert reads_before_wait(TWO + WAIT_FOR_FIRST + second)
    assert not reads_before_wait(TWO + WAIT_FOR_FIRST + first + WAIT + second)
