"""The instructions of exact arithmetic's kernels are those that IEEE 754 and integer arithmetic define, by the compiler
that is installed; beside the interpreted tests, because it compiles kernels. ``make test-triton`` looks at every
variant for every GPU.
"""

import pytest

from tests.ops.exact.ptx import forbidden
from tests.ops.test_compiled_kernels import program

pytestmark = pytest.mark.interpreted


def test_one_variant_of_each_kernel_has_no_approximation_and_every_injected_one_is_found() -> None:
    pytest.importorskip("triton")
    run = program("exact.ptx_lint")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("instruction", "kernel", "is_forbidden"),
    [
        ("ex2.approx.ftz.f32", "", True),
        ("div.full.f32", "", True),
        ("mul.f32", "", True),
        ("add.f32x2", "", True),
        ("sub.bf16x2", "", True),
        ("fma.rn.f32", "", True),
        ("mad.rn.f32", "", True),
        ("cvt.rn.f32.f64", "linear_kernel", True),
        ("atom.global.gpu.acq_rel.add.f32", "", True),
        ("cvt.rn.f32.f64", "softmax_kernel", False),
        ("cvt.rn.f32.s64", "", False),
        ("mul.rn.f32", "", False),
        ("add.rn.f32x2", "", False),
        ("div.rn.f32", "", False),
        ("add.s32", "", False),
        ("mad.lo.s32", "", False),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "", False),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "", False),
    ],
)
def test_what_is_forbidden_is_found(instruction, kernel, is_forbidden):
    for line in (
        f"\t{instruction} \t%f1, %f2, %f3;",
        f"@%p1 {instruction} %f1, %f2, %f3;",
        f"\t{{ {instruction} %f1, %f2; }}",
    ):
        assert list(forbidden(f".reg .f32 %f<9>;\n{line}\nret;\n", kernel)) == [instruction] * is_forbidden
