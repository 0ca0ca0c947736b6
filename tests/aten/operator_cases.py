"""Batches through PyTorch's operators that reduce: a row's result, and its gradient, must not follow the other rows.

usage: python -m tests.aten.operator_cases [--device cuda] [--stock] [NAME ...]     prints the cases that differ
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F

from vllm_batch_invariant import batch_invariant_mode

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (7, 100, 300, 1031)
LONG = 70_001
"""A row that several threads, or several programs of a GPU, share where it is alone."""
ROWS = 65
PARTS = (slice(64, 65), slice(0, 2), slice(5, 8), slice(20, 28), slice(30, 63))


@cache
def constant(*shape: int, like: tuple[torch.dtype, torch.device], seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(*reversed(like))


def const(x: Tensor, *shape: int, seed: int = 1) -> Tensor:
    """The same numbers for every batch, in x's dtype and on its device."""
    return constant(*shape, like=(x.dtype, x.device), seed=seed)


def integers(x: Tensor, below: int, columns: int = 1) -> Tensor:
    """[rows, columns] integers that follow from each row of x."""
    first = (x[:, :1].detach().double().abs() * 1000).long()
    return (first + 3 * torch.arange(columns, device=x.device)) % below


def square(x: Tensor) -> Tensor:
    """[rows, 7, 7] of each row, dominated by the diagonal."""
    cells = x[:, :49] if x.shape[1] >= 49 else x.repeat(1, 7)
    return cells.reshape(-1, 7, 7) * const(x, 7, 7) + 4 * torch.eye(7, dtype=x.dtype, device=x.device)


def image(x: Tensor, dims: int) -> Tensor:
    """[rows, 2, 5, ..., 60] of each row, with that many dimensions behind the channels."""
    width = x[:, :60] if x.shape[1] >= 60 else x.repeat(1, 9)[:, :60]
    return width.reshape(len(x), *[1] * dims, -1).expand(-1, 2, *[5] * (dims - 1), -1).contiguous()


def groups(x: Tensor) -> Tensor:
    """Which of five every column belongs to."""
    return torch.arange(x.shape[1], device=x.device) % 5


_modules: dict[tuple, torch.nn.Module] = {}


def module(x: Tensor, make: type[torch.nn.Module], *arguments: object, **options: object) -> torch.nn.Module:
    """A layer with the same weights for every batch."""
    key = make, arguments, x.dtype, x.device
    if key not in _modules:
        torch.manual_seed(0)
        _modules[key] = make(*arguments, **options).to(x.device, x.dtype).eval()
    return _modules[key]


def recurrent(make: type[torch.nn.Module]) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        x = x[:, :100]
        return module(x, make, x.shape[1], 16, batch_first=True)(x[:, None].expand(-1, 3, -1).contiguous())[0]

    return apply


ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim),
    "mean": lambda x, dim: x.mean(dim),
    "nansum": lambda x, dim: x.nansum(dim),
    "nanmean": lambda x, dim: x.nanmean(dim),
    "prod": lambda x, dim: torch.where(x == 0, x, 1 + x / 64).prod(dim),
    "cumprod": lambda x, dim: torch.where(x == 0, x, 1 + x / 64).cumprod(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "var": lambda x, dim: x.var(dim),
    "var, correction 0": lambda x, dim: x.var(dim, correction=0),
    "std": lambda x, dim: x.std(dim),
    "var_mean": lambda x, dim: torch.stack(torch.var_mean(x, dim), -1 if dim else 0),
    "std_mean": lambda x, dim: torch.stack(torch.std_mean(x, dim), -1 if dim else 0),
    "vector_norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "vector_norm, 0": lambda x, dim: torch.linalg.vector_norm(x * 1, 0, dim) + x.sum(dim) * 0,
    "vector_norm, 1": lambda x, dim: torch.linalg.vector_norm(x, 1, dim),
    "vector_norm, 3": lambda x, dim: torch.linalg.vector_norm(x, 3, dim),
    "vector_norm, 0.5": lambda x, dim: torch.linalg.vector_norm(x, 0.5, dim),
    "vector_norm, inf": lambda x, dim: torch.linalg.vector_norm(x, float("inf"), dim),
    "norm": lambda x, dim: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [dim]),
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "cosine_similarity": lambda x, dim: F.cosine_similarity(x, x.flip(dim), dim=dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "glu": lambda x, dim: F.glu(x.narrow(dim, 0, x.shape[dim] // 2 * 2), dim),
    "trapezoid": lambda x, dim: torch.trapezoid(x, dim=dim),
    "median": lambda x, dim: x.median(dim)[0],
    "sort": lambda x, dim: x.sort(dim)[0],
    "amax": lambda x, dim: x.amax(dim),
}
"""Functions of a batch and of the dimension that each row lies along."""

EACH: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, const(x, 33, x.shape[1]), const(x, 33)),
    "mv": lambda x: x @ const(x, x.shape[1]),
    "bmm": lambda x: square(x) @ square(x),
    "einsum": lambda x: torch.einsum("nij,njk->nik", square(x), square(x)),
    "vecdot": lambda x: torch.linalg.vecdot(x, x.flip(1)),
    "bilinear": lambda x: F.bilinear(x[:, :7], x[:, :7].flip(1), const(x, 3, 7, 7)),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:6]),
    "matrix_power": lambda x: torch.linalg.matrix_power(square(x) / 8, 3),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(square(x)),
    "trace": lambda x: torch.stack([torch.trace(matrix) for matrix in square(x)]),
    "attention": lambda x: F.scaled_dot_product_attention(*[square(x)[:, None]] * 3),
    "attention, masked": lambda x: F.scaled_dot_product_attention(
        *[square(x)[:, None]] * 3, attn_mask=torch.ones(7, 7, dtype=torch.bool, device=x.device).tril()
    ),
    "multi-head attention": lambda x: module(x, torch.nn.MultiheadAttention, 7, 1, batch_first=True)(*[square(x)] * 3)[
        0
    ],
    "LSTM": recurrent(torch.nn.LSTM),
    "GRU": recurrent(torch.nn.GRU),
    "RNN": recurrent(torch.nn.RNN),
    "LSTM cell": lambda x: module(x, torch.nn.LSTMCell, 7, 16)(x[:, :7].contiguous())[0],
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:], const(x, x.shape[1]), const(x, x.shape[1])),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:], const(x, x.shape[1])),
    "group_norm": lambda x: F.group_norm(x[:, :100, None].repeat(1, 2, 3), 2),
    "batch_norm, evaluation": lambda x: F.batch_norm(x, const(x, x.shape[1]), const(x, x.shape[1]).abs()),
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1].abs(), 0),
    "renorm": lambda x: x.renorm(2, 0, 0.5),
    "norms of a list": lambda x: torch.stack(torch._foreach_norm([*x])),
    "dist": lambda x: torch.stack([torch.dist(row, row.flip(0)) for row in x]),
    "cdist": lambda x: torch.cdist(x, const(x, 5, x.shape[1])),
    "cdist, to many": lambda x: torch.cdist(x[:, None, :], const(x, 27, x.shape[1])),
    "cdist, by matmul": lambda x: torch.cdist(x, const(x, 5, x.shape[1]), compute_mode="use_mm_for_euclid_dist"),
    "cdist, 1": lambda x: torch.cdist(x, const(x, 5, x.shape[1]), p=1),
    "cdist, 3": lambda x: torch.cdist(x, const(x, 5, x.shape[1]), p=3),
    "pdist": lambda x: torch.stack([torch.pdist(torch.stack([row, row.flip(0)]))[0] for row in x]),
    "cross_entropy": lambda x: F.cross_entropy(x, integers(x, x.shape[1])[:, 0], reduction="none"),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(
        x, integers(x, x.shape[1])[:, 0], reduction="none", label_smoothing=0.1
    ),
    "cross_entropy, of probabilities": lambda x: F.cross_entropy(x, x.flip(1).softmax(1), reduction="none"),
    "cross_entropy, of maps": lambda x: F.cross_entropy(
        x[:, :, None, None].repeat(1, 1, 2, 2), integers(x, x.shape[1], 4).view(-1, 2, 2), reduction="none"
    ),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.flip(1).softmax(1), reduction="none").sum(1),
    "ctc_loss": lambda x: F.ctc_loss(
        (x[:, :60, None] * const(x, 5)).transpose(0, 1).log_softmax(-1),
        torch.ones(len(x), 2, dtype=torch.long, device=x.device),
        torch.full((len(x),), min(60, x.shape[1])),
        torch.full((len(x),), 2),
        reduction="none",
    ),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, integers(x, x.shape[1])[:, 0], reduction="none"),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(
        x, F.pad(integers(x, x.shape[1]), (0, x.shape[1] - 1), value=-1), reduction="none"
    ),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(
        x, (x.flip(1) > 0).to(x.dtype), reduction="none"
    ),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(
        x, x.flip(1), torch.ones(len(x), device=x.device), reduction="none"
    ),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.flip(1), x.roll(1, 1), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(1).detach(), reduction="none"),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy_with_logits(
        x, x.flip(1).sigmoid().detach(), reduction="none"
    ),
    "avg_pool1d": lambda x: F.avg_pool1d(image(x, 1), 3),
    "avg_pool2d": lambda x: F.avg_pool2d(image(x, 2), 3),
    "avg_pool2d, channels last": lambda x: F.avg_pool2d(image(x, 2).contiguous(memory_format=torch.channels_last), 3),
    "avg_pool3d": lambda x: F.avg_pool3d(image(x, 3), 3),
    "lp_pool1d": lambda x: F.lp_pool1d(image(x, 1).abs() + 1, 2, 3),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(image(x, 1), 7),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(image(x, 2), 3),
    "adaptive_avg_pool2d, whole": lambda x: F.adaptive_avg_pool2d(image(x, 2), 1),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(image(x, 3), 3),
    "adaptive_avg_pool3d, whole": lambda x: F.adaptive_avg_pool3d(image(x, 3), 1),
    "local_response_norm": lambda x: F.local_response_norm(image(x, 1), 2),
    "interpolate, linear": lambda x: F.interpolate(image(x, 1), scale_factor=1.7, mode="linear"),
    "interpolate, bilinear": lambda x: F.interpolate(image(x, 2), scale_factor=1.7, mode="bilinear"),
    "interpolate, bicubic": lambda x: F.interpolate(image(x, 2), scale_factor=1.7, mode="bicubic"),
    "interpolate, trilinear": lambda x: F.interpolate(image(x, 3)[..., :9], scale_factor=1.7, mode="trilinear"),
    "interpolate, bilinear, antialias": lambda x: F.interpolate(
        image(x, 2), scale_factor=0.6, mode="bilinear", antialias=True
    ),
    "interpolate, bicubic, antialias": lambda x: F.interpolate(
        image(x, 2), scale_factor=0.6, mode="bicubic", antialias=True
    ),
    "grid_sample": lambda x: F.grid_sample(
        image(x, 2), const(x, 1, 4, 4, 2).expand(len(x), -1, -1, -1), align_corners=False
    ),
    "grid_sample, 3d": lambda x: F.grid_sample(
        image(x, 3)[..., :9], const(x, 1, 4, 4, 4, 3).expand(len(x), -1, -1, -1, -1), align_corners=False
    ),
    "fold": lambda x: F.fold(image(x, 1).view(len(x), 4, 30)[:, :, :16], (5, 5), (2, 2)),
    "unfold": lambda x: x.unfold(1, 5, 2),
    "scatter_add": lambda x: x.new_zeros(len(x), 5).scatter_add(1, groups(x).expand_as(x), x),
    "scatter_reduce, mean": lambda x: x.new_zeros(len(x), 5).scatter_reduce(1, groups(x).expand_as(x), x, "mean"),
    "scatter_reduce, prod": lambda x: x.new_ones(len(x), 5).scatter_reduce(
        1, groups(x).expand_as(x), 1 + x / 64, "prod"
    ),
    "index_add": lambda x: x.new_zeros(len(x), 5).index_add(1, groups(x), x),
    "index_reduce": lambda x: x.new_ones(len(x), 5).index_reduce(1, groups(x), 1 + x / 64, "prod"),
    "index_put": lambda x: x.new_zeros(len(x), 5).index_put(
        (torch.arange(len(x), device=x.device)[:, None], groups(x)[None]), x, accumulate=True
    ),
    "put": lambda x: x.new_zeros(len(x), 5).put(
        torch.arange(len(x), device=x.device)[:, None] * 5 + groups(x), x, accumulate=True
    ),
    "embedding_bag, sum": lambda x: F.embedding_bag(integers(x, 13, 11), const(x, 13, 300), mode="sum") + 0 * x[:, :1],
    "embedding_bag, mean": lambda x: (
        F.embedding_bag(integers(x, 13, 11), const(x, 13, 300), mode="mean") + 0 * x[:, :1]
    ),
    "segment_reduce": lambda x: torch.segment_reduce(
        x.reshape(-1), "sum", lengths=torch.full((len(x),), x.shape[1], device=x.device)
    ),
    "addcmul": lambda x: torch.addcmul(x, x.flip(1), x.roll(1, 1), value=0.3),
    "addcdiv": lambda x: torch.addcdiv(x, x.flip(1), x.roll(1, 1).abs() + 1, value=0.3),
    "selu": lambda x: F.selu(x),
    "pow": lambda x: torch.pow(x.abs(), x.flip(1)),
}
"""Functions of a batch whose rows come first."""

KEPT_SHORT = ("pool", "interpolate", "grid", "fold", "LSTM", "GRU", "RNN", "attention", "response", "embedding_bag")
"""How names contain that a longer row would give no other work."""


def draw(rows: int, length: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of a normal distribution; the first ones but row 0 have a zero, a NaN and infinities."""
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    for row, value in ((1, 0.0), (2, float("nan")), (3, float("inf")), (6, -float("inf"))):
        if row < rows:
            x[row, length // 2] = value
    return x.to(device, dtype)


def plain(rows: int, length: int, dtype: torch.dtype, device: str) -> Tensor:
    """The same without what is not finite: integers are made of these."""
    return draw(rows, length, dtype, device).nan_to_num(0.5, 0.5, 0.5)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two results have the same bits; one NaN is like another."""
    numbers = a == b
    return (
        a.shape == b.shape
        and bool((numbers | (a.isnan() & b.isnan())).all())
        and bool((a.signbit() == b.signbit())[numbers].all())
    )


def results(function: Callable[[Tensor], Tensor], part: Tensor, weights: Tensor, gradient: bool) -> list[Tensor]:
    """What a case makes of a part of the batch, rows first, and the gradient."""
    if not gradient:
        with torch.no_grad():
            return [function(part)]
    part = part.detach().clone().requires_grad_()
    out = function(part)
    if not out.requires_grad:
        return [out]
    (out.flatten(1) if out.dim() > 1 else out[:, None]).mul(weights[:, :1].to(out.dtype)).sum().backward()
    return [out.detach(), part.grad]


def differing(function: Callable[[Tensor], Tensor], x: Tensor, parts: tuple[slice, ...], gradient: bool) -> list[str]:
    """The parts of a batch, at their first row, whose results differ from those of the same rows in the whole."""
    weights = plain(len(x), 7, torch.float32, str(x.device))
    whole = results(function, x, weights, gradient)
    return [
        f"rows {rows.start} to {rows.stop}, {kind}"
        for rows in parts
        for kind, part, all_ in zip(
            ("result", "gradient"),
            results(function, x[rows].contiguous(), weights[rows], gradient),
            whole,
            strict=False,
        )
        if not same(part, all_[rows])
    ]


def _turned(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """The rows are columns of a contiguous tensor."""

    def apply(x: Tensor) -> Tensor:
        out = function(x.t().contiguous(), 0)
        return out if out.dim() == 1 else out.movedim(-1, 0)

    return apply


def measurements(name: str, device: str) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """What is to be measured of a case: (dtype, length and layout, what names the parts that differ)."""
    if name in ALONG:
        forms = {"rows": lambda x: ALONG[name](x, 1), "columns": _turned(ALONG[name])}
        lengths, numbers = LENGTHS, draw
    else:
        short = any(word in name for word in KEPT_SHORT)
        forms, lengths, numbers = {"rows": EACH[name]}, (LENGTHS[:2] if short else LENGTHS), plain
    for form, function in forms.items():
        for dtype in DTYPES:
            for length in lengths:
                x = numbers(ROWS, length, dtype, device)
                yield f"{dtype} {length} {form}", lambda f=function, x=x: differing(f, x, PARTS, True)
            shared = x.is_cuda or torch.get_num_threads() > 1
            if shared and name in ALONG and dtype in (torch.float32, torch.float64):
                x = numbers(3, LONG, dtype, device)
                parts = (slice(0, 1), slice(1, 3))
                yield f"{dtype} {LONG} {form}", lambda f=function, x=x, p=parts: differing(f, x, p, False)


def measure(name: str, device: str = "cpu") -> tuple[int, list[str]]:
    """How many measurements of a case ran, where PyTorch has a kernel of the dtype, and what differed."""
    ran, found = 0, []
    for what, find in measurements(name, device):
        try:
            differences = find()
        except (NotImplementedError, RuntimeError) as error:
            if "not implemented for" in str(error) or "INTERNAL ASSERT" in str(error):
                continue
            raise
        ran += 1
        found += [f"{what}: {difference}" for difference in differences]
    return ran, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stock", action="store_true", help="without the mode")
    given = parser.parse_args()
    began = time.monotonic()
    with nullcontext() if given.stock else batch_invariant_mode():
        for name in given.names or (*ALONG, *EACH):
            try:
                ran, found = measure(name, given.device)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                continue
            if found or not ran:
                print(f"{name}: {len(found)} differences in {ran} measurements {found[:3]}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
