"""Stands for cuBLASLt where there is none: the same functions on the memory of the CPU, by the same rules."""

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import torch

_DTYPES = {14: torch.bfloat16, 2: torch.float16, 28: torch.float8_e4m3fn}
_STEP = 16


def sequential_k(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, splits: int = 1) -> torch.Tensor:
    """a @ b + bias for 16-bit operands: one fp32 accumulator that walks K upwards in steps of 16, or one for each of
    several splits of K; rounded once.
    """
    total = torch.zeros(a.shape[0], b.shape[1])
    for split in torch.arange(a.shape[1]).tensor_split(splits):
        accumulator = torch.zeros_like(total)
        for step in split.split(_STEP):
            exact = a[:, step].double() @ b[step].double()
            accumulator = (accumulator.double() + exact).float()
        total += accumulator
    return (total if bias is None else total + bias.float()).to(a.dtype)


class Refused(Exception):
    """cuBLASLtError: the library does not take these arguments."""


@dataclass
class Layout:
    """A column-major matrix."""

    dtype: int
    rows: int
    columns: int
    ld: int

    def at(self, address: int) -> torch.Tensor:
        """The matrix in memory, [rows, columns]."""
        if self.ld < self.rows:
            raise Refused("columns overlap")
        length, dtype = self.ld * (self.columns - 1) + self.rows, _DTYPES[self.dtype]
        memory = np.frombuffer((ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address), np.uint8)
        return torch.from_numpy(memory).view(dtype).as_strided((self.rows, self.columns), (1, self.ld))


Preference = IntEnum(
    "Preference",
    "MAX_WORKSPACE_BYTES REDUCTION_SCHEME_MASK MIN_ALIGNMENT_A_BYTES MIN_ALIGNMENT_B_BYTES MIN_ALIGNMENT_C_BYTES "
    "MIN_ALIGNMENT_D_BYTES",
)
Operation = IntEnum(
    "Operation",
    "TRANSA TRANSB EPILOGUE BIAS_POINTER A_SCALE_MODE B_SCALE_MODE A_SCALE_POINTER B_SCALE_POINTER",
)
_POINTERS = (Operation.BIAS_POINTER, Operation.A_SCALE_POINTER, Operation.B_SCALE_POINTER)
Scale = IntEnum("Scale", {"VEC128_32F": 4, "BLK128x128_32F": 5})
Config = IntEnum("Config", "TILE_ID STAGES_ID CLUSTER_SHAPE_ID SPLITK_NUM REDUCTION_SCHEME")
ALGORITHM = np.dtype([("data_", "<u8", (8,))])


@dataclass
class Library:
    """Functions of ``nvmath.bindings.cublasLt``. A descriptor is a number, and one that was destroyed is an error."""

    splits: tuple[int, ...] = (1, 3)
    """In how many parts the heuristic's algorithms compute K."""
    alive: dict[int, object] = field(default_factory=dict)
    launches: list[int] = field(default_factory=list)
    """M of each GEMM that was run."""

    cuBLASLtError = Refused  # noqa: N815
    MatmulPreferenceAttribute, MatmulDescAttribute, MatmulAlgoConfigAttribute = Preference, Operation, Config
    MatmulMatrixScale = Scale
    Epilogue = SimpleNamespace(BIAS=4)
    MatmulTile = IntEnum("MatmulTile", {"TILE_64x64": 1, "TILE_128x128": 2})
    ClusterShape = IntEnum("ClusterShape", {"SHAPE_1x1x1": 2})
    matmul_heuristic_result_dtype = np.dtype([("algo", ALGORITHM), ("workspace_size", "<u8"), ("state", "<i4", (8,))])

    def _make(self, made: object) -> int:
        number = 1000 + len(self.launches) + 7 * len(self.alive)
        while number in self.alive:
            number += 1
        self.alive[number] = made
        return number

    def _destroy(self, number: int) -> None:
        del self.alive[number]

    def create(self) -> int:
        return self._make("handle")

    def get_version(self) -> int:
        return 130000

    def matmul_preference_create(self) -> int:
        return self._make({})

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0), "not in fp32"
        return self._make({})

    def matrix_layout_create(self, dtype: int, rows: int, columns: int, ld: int) -> int:
        return self._make(Layout(dtype, rows, columns, ld))

    matmul_preference_destroy = matmul_desc_destroy = matrix_layout_destroy = _destroy

    def _dtype(self, attribute: IntEnum) -> type:
        return np.uint64 if attribute in (Preference.MAX_WORKSPACE_BYTES, *_POINTERS) else np.uint32

    get_matmul_preference_attribute_dtype = get_matmul_desc_attribute_dtype = _dtype

    def get_matmul_algo_config_attribute_dtype(self, attribute: Config) -> type:
        return np.uint32

    def _set(self, number: int, attribute: IntEnum, address: int, size: int) -> None:
        assert size == np.dtype(self._dtype(attribute)).itemsize
        self.alive[number][attribute] = int.from_bytes(ctypes.string_at(address, size), "little")

    matmul_preference_set_attribute = matmul_desc_set_attribute = _set

    def matmul_algo_get_heuristic(
        self,
        handle: int,
        operation: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        most: int,
        out: int,
        count: int,
    ) -> None:
        for number in (handle, operation, a, b, c, d, preference):
            assert number in self.alive, "destroyed"
        wanted = self.alive[preference]
        splits = wanted[Preference.REDUCTION_SCHEME_MASK] and wanted[Preference.MAX_WORKSPACE_BYTES]
        found = [split for split in self.splits if split == 1 or splits][:most]
        results = np.zeros(len(found), self.matmul_heuristic_result_dtype)
        for index, split in enumerate(found):
            results["algo"]["data_"][index, :2] = index + 1, split
        ctypes.memmove(out, results.ctypes.data, results.nbytes)
        ctypes.c_int32.from_address(count).value = len(found)

    def matmul_algo_config_get_attribute(
        self, algorithm: int, attribute: Config, value: int, size: int, _: int
    ) -> None:
        tile, split, reduction = np.frombuffer((ctypes.c_uint64 * 3).from_address(algorithm), np.uint64)
        if tile > 1 << 32:
            raise Refused("no algorithm")
        config = {Config.TILE_ID: tile, Config.SPLITK_NUM: split, Config.CLUSTER_SHAPE_ID: 2}
        config[Config.REDUCTION_SCHEME] = reduction
        ctypes.c_uint32.from_address(value).value = int(config.get(attribute, 0))

    def matmul(
        self,
        handle: int,
        operation: int,
        one: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        zero: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algorithm: int,
        workspace: int,
        workspace_size: int,
        stream: int,
    ) -> None:
        for number in (handle, operation, a_layout, b_layout, c_layout, d_layout):
            assert number in self.alive, "destroyed"
        assert ctypes.c_float.from_address(one).value == 1
        assert ctypes.c_float.from_address(zero).value == 0
        assert (a | b | c | d) % 16 == 0, "not aligned as promised"
        split = np.frombuffer((ctypes.c_uint64 * 2).from_address(algorithm), np.uint64)[1]
        if split > 1 and not workspace:
            raise Refused("no workspace")
        settings = self.alive[operation]
        left, right, out = (
            self.alive[layout].at(address) for layout, address in ((a_layout, a), (b_layout, b), (d_layout, d))
        )
        left = left.t() if settings[Operation.TRANSA] else left
        right = right.t() if settings[Operation.TRANSB] else right
        assert (len(left), right.shape[1]) == out.shape
        assert left.shape[1] == len(right)
        bias = None
        if settings.get(Operation.EPILOGUE) == self.Epilogue.BIAS:
            address = settings[Operation.BIAS_POINTER]
            assert address % 16 == 0, "bias not aligned"
            bias = Layout(self.alive[a_layout].dtype, len(left), 1, len(left)).at(address)[:, 0]
        self.launches.append(right.shape[1])
        if Operation.A_SCALE_MODE in settings:
            out.t().copy_(_by_blocks(right.t(), left, settings, out.dtype))
            return
        out.t().copy_(sequential_k(right.t(), left.t(), bias, int(split)))


def _by_blocks(x: torch.Tensor, weight: torch.Tensor, settings: dict[IntEnum, int], dtype: torch.dtype) -> torch.Tensor:
    """Codes [M, K] and [N, K] with scales as cuBLASLt documents those of 1 x 128 and 128 x 128; a CPU's sums."""
    from vllm_batch_invariant.ops.scaled_linear import scaled_linear

    assert settings[Operation.A_SCALE_MODE] == Scale.BLK128x128_32F
    assert settings[Operation.B_SCALE_MODE] == Scale.VEC128_32F
    (m, k), n = x.shape, len(weight)
    groups, blocks = -(-k // 128), -(-n // 128)
    if m % 4 or groups % 4:
        raise Refused("scales are not aligned")

    def at(attribute: Operation, rows: int, columns: int) -> torch.Tensor:
        assert settings[attribute] % 16 == 0, "scales not aligned"
        memory = (ctypes.c_float * (rows * columns)).from_address(settings[attribute])
        return torch.from_numpy(np.frombuffer(memory, np.float32)).view(rows, columns)

    of_x, of_weight = at(Operation.B_SCALE_POINTER, groups, m).t(), at(Operation.A_SCALE_POINTER, blocks, groups)
    return scaled_linear(x.contiguous(), of_x.contiguous(), weight.contiguous(), of_weight, None, dtype)
