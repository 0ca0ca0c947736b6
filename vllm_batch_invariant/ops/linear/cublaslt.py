"""GEMMs by cuBLASLt, asked for algorithms that do not split K, through nvmath-python's binding of its C interface.

cuBLAS as PyTorch calls it picks an algorithm for every number of rows, and some of them split K to fill the GPU, which
changes the bits. Here the heuristic may name only algorithms without a reduction between programs and without a
workspace, in which such a reduction would be kept; the caller picks one and holds on to it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from nvmath.bindings import cublasLt as lt  # noqa: N813

from .problem import ALIGNMENT, GemmProblem, ScaledProblem, leading_dim

_DATA_TYPE = {torch.bfloat16: 14, torch.float16: 2, torch.float32: 0, torch.float8_e4m3fn: 28}
_COMPUTE_FP32 = 68
_FP32 = _DATA_TYPE[torch.float32]
_EVERY_REDUCTION = 2**32 - 1
_MOST_DESCRIPTORS = 4096
_OPAQUE = 64
"""Bytes of an algorithm."""

Error = lt.cuBLASLtError


def version() -> str:
    """The library's version number."""
    return str(lt.get_version())


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of cuBLASLt: a compiled kernel with its tile, as the library encodes it."""

    opaque: bytes
    """64 bytes, valid for one version of the library on one GPU."""
    split: int
    """In how many parts K is computed; 1 is the only one to serve with."""
    about: str


NO_SCALES = 0, 0
"""Of operands that are multiplied as they are."""


class Matmul:
    """Runs the GEMMs of one problem, or of a problem's slices."""

    def __init__(self, problem: GemmProblem | ScaledProblem) -> None:
        self.problem = problem.k_slice
        self._handle = handle(problem.device)
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        self._one_address, self._zero_address = self._one.ctypes.data, self._zero.ctypes.data
        self._operations: dict[tuple[int, ...], int] = {}
        self._layouts: dict[tuple[int, int, int, torch.dtype], int] = {}
        self._encoded: dict[bytes, tuple[np.ndarray, int]] = {}

    def algorithms(self, m: int, most: int, workspace: int = 0, scales: tuple[int, int] = NO_SCALES) -> list[Algorithm]:
        """The heuristic's algorithms for M rows, the most promising first.

        Args:
            m: rows of a.
            most: how many to ask for.
            workspace: bytes. With any, algorithms that split K are asked for, too: what no GEMM is served with, and
                what the autotuner must be seen to refuse.
            scales: as of :meth:`run`.
        """
        p = self.problem
        self._make_room()
        preference = lt.matmul_preference_create()
        attributes = lt.MatmulPreferenceAttribute
        settings = {
            attributes.MAX_WORKSPACE_BYTES: workspace,
            attributes.REDUCTION_SCHEME_MASK: _EVERY_REDUCTION if workspace else 0,
            # The heuristic would otherwise assume 256.
            attributes.MIN_ALIGNMENT_A_BYTES: ALIGNMENT,
            attributes.MIN_ALIGNMENT_B_BYTES: ALIGNMENT,
            attributes.MIN_ALIGNMENT_C_BYTES: ALIGNMENT,
            attributes.MIN_ALIGNMENT_D_BYTES: ALIGNMENT,
        }
        for attribute, value in settings.items():
            value = np.array([value], lt.get_matmul_preference_attribute_dtype(attribute))
            lt.matmul_preference_set_attribute(preference, attribute, value.ctypes.data, value.nbytes)
        found = np.zeros(most, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        out, operands = self._layout(p.n, m, p.n, p.dtype), p.operands
        try:
            lt.matmul_algo_get_heuristic(
                self._handle,
                self._operation(0, scales),
                self._layout(*p.b_layout(), operands),
                self._layout(*p.a_layout(m), operands),
                out,
                out,
                preference,
                most,
                found.ctypes.data,
                count.ctypes.data,
            )
        except Error:  # it has none for this problem
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        known = [_algorithm(result["algo"]) for result in found[: count[0]]]
        return known if workspace else [algorithm for algorithm in known if algorithm.split == 1]

    def run(
        self,
        algorithm: Algorithm,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lda: int | None = None,
        ldb: int | None = None,
        scales: tuple[int, int] = NO_SCALES,
    ) -> None:
        """out = a @ b + bias on the current stream. a: [M, K] and b: [K, N] as the problem has them, out: [M, N].

        Args:
            algorithm: of :meth:`algorithms`.
            a: [M, K]
            b: [K, N]
            bias: [N], or None.
            out: [M, N], packed.
            workspace: bytes for an algorithm that needs them.
            lda: :func:`.problem.leading_dim` of a, if known already.
            ldb: the same of b.
            scales: addresses of the scales of a and of b, where the problem has some.

        Raises:
            Error: the library refuses the algorithm for this M; nothing was launched.
        """
        m = out.shape[0]
        self._make_room()
        encoded = self._encoded.get(algorithm.opaque)
        if encoded is None:
            array = np.frombuffer(algorithm.opaque, np.uint8).copy()
            encoded = self._encoded[algorithm.opaque] = array, array.ctypes.data
        layout_out, operands = self._layout(out.shape[1], m, out.shape[1], self.problem.dtype), self.problem.operands
        address = out.data_ptr()
        if torch.cuda.current_device() != self.problem.device:
            with torch.cuda.device(self.problem.device):
                return self.run(algorithm, a, b, bias, out, workspace, lda, ldb, scales)
        # Column-major, as cuBLAS counts, the GEMM is transposed: out.T [N, M] = b.T [N, K] @ a.T [K, M].
        lt.matmul(
            self._handle,
            self._operation(0 if bias is None else bias.data_ptr(), scales),
            self._one_address,
            b.data_ptr(),
            self._layout(*self.problem.b_layout(leading_dim(b)[0] if ldb is None else ldb), operands),
            a.data_ptr(),
            self._layout(*self.problem.a_layout(m, leading_dim(a)[0] if lda is None else lda), operands),
            self._zero_address,
            address,
            layout_out,
            address,
            layout_out,
            encoded[1],
            0 if workspace is None else workspace.data_ptr(),
            0 if workspace is None else workspace.numel(),
            torch._C._cuda_getCurrentRawStream(self.problem.device),
        )
        return None

    def _make_room(self) -> None:
        """Forget descriptors if there are many: before a call, which holds on to those it looks up."""
        if len(self._operations) >= _MOST_DESCRIPTORS:
            for old in self._operations.values():
                lt.matmul_desc_destroy(old)
            self._operations.clear()
        if len(self._layouts) >= _MOST_DESCRIPTORS:
            for old in self._layouts.values():
                lt.matrix_layout_destroy(old)
            self._layouts.clear()

    def _operation(self, bias: int, scales: tuple[int, int]) -> int:
        """The operation's descriptor for a bias at an address; 0 for none, or for any where nothing is run."""
        key = bias, *scales
        if (descriptor := self._operations.get(key)) is not None:
            return descriptor
        descriptor = lt.matmul_desc_create(_COMPUTE_FP32, _FP32)
        attributes = lt.MatmulDescAttribute
        settings = {
            attributes.TRANSA: int(self.problem.b_k_major),
            attributes.TRANSB: int(not self.problem.a_k_major),
        }
        if self.problem.spec.epilogue.has_bias:
            settings[attributes.EPILOGUE] = lt.Epilogue.BIAS
            settings[attributes.BIAS_POINTER] = bias
        if scales != NO_SCALES:  # a is the library's second matrix
            settings |= {
                attributes.A_SCALE_MODE: lt.MatmulMatrixScale.BLK128x128_32F,
                attributes.B_SCALE_MODE: lt.MatmulMatrixScale.VEC128_32F,
                attributes.A_SCALE_POINTER: scales[1],
                attributes.B_SCALE_POINTER: scales[0],
            }
        for attribute, value in settings.items():
            value = np.array([value], lt.get_matmul_desc_attribute_dtype(attribute))
            lt.matmul_desc_set_attribute(descriptor, attribute, value.ctypes.data, value.nbytes)
        self._operations[key] = descriptor
        return descriptor

    def _layout(self, rows: int, columns: int, ld: int, dtype: torch.dtype) -> int:
        """The descriptor of a column-major matrix."""
        key = rows, columns, ld, dtype
        if (descriptor := self._layouts.get(key)) is not None:
            return descriptor
        descriptor = lt.matrix_layout_create(_DATA_TYPE[dtype], rows, columns, ld)
        self._layouts[key] = descriptor
        return descriptor


@cache
def handle(device: int) -> int:
    """The library's handle for a GPU, which also shows that it can be used."""
    version()
    with torch.cuda.device(device):
        return lt.create()


def stored_algorithm(opaque: bytes, about: str) -> Algorithm:
    """The algorithm that another process has found, as the library reads it: who wrote it down need not be trusted.

    Args:
        opaque: of :class:`Algorithm`.
        about: the same.

    Raises:
        ValueError: it has another size, the library does not know it, or it splits K.
    """
    if len(opaque) != _OPAQUE:
        raise ValueError(f"an algorithm of cuBLASLt has {_OPAQUE} bytes")
    try:
        split = _algorithm(np.frombuffer(opaque, np.uint8)).split
    except Error as error:
        raise ValueError(f"cuBLASLt does not know an algorithm: {error}") from error
    if split != 1:
        raise ValueError("an algorithm of cuBLASLt splits K")
    return Algorithm(opaque, split, about)


def _algorithm(encoded: np.ndarray | np.void) -> Algorithm:
    array = np.array([encoded])
    attributes = lt.MatmulAlgoConfigAttribute
    names = ("TILE_ID", "STAGES_ID", "CLUSTER_SHAPE_ID", "SPLITK_NUM", "REDUCTION_SCHEME")
    config = {}
    for name in names:
        attribute = getattr(attributes, name)
        value = np.zeros(1, lt.get_matmul_algo_config_attribute_dtype(attribute))
        written = np.zeros(1, np.uint64)
        lt.matmul_algo_config_get_attribute(
            array.ctypes.data, attribute, value.ctypes.data, value.nbytes, written.ctypes.data
        )
        config[name] = int(value[0])
    tile = _name(lt.MatmulTile, config["TILE_ID"]).removeprefix("TILE_")
    cluster = _name(lt.ClusterShape, config["CLUSTER_SHAPE_ID"]).removeprefix("SHAPE_")
    split = max(config["SPLITK_NUM"], 2 if config["REDUCTION_SCHEME"] else 1)
    return Algorithm(array.tobytes(), split, f"tile {tile}, cluster {cluster}")


def _name(names: type, value: int) -> str:
    try:
        return names(value).name
    except ValueError:  # newer than the binding
        return str(value)
