"""Every way to write a product or a reduction in PyTorch, for tensors of any device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass
class Operands:
    """Tensors with fixed values, put on a device by ``place``."""

    place: Callable[[Tensor], Tensor]

    def _random(self, *shape: int) -> Tensor:
        return self.place(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))))

    @cached_property
    def x(self) -> Tensor:
        return self._random(6, 16)

    @cached_property
    def w(self) -> Tensor:
        return self._random(16, 10)

    @cached_property
    def weight(self) -> Tensor:
        return self._random(10, 16)

    @cached_property
    def bias(self) -> Tensor:
        return self._random(10)

    @cached_property
    def added(self) -> Tensor:
        return self._random(6, 10)

    @cached_property
    def v(self) -> Tensor:
        return self._random(16)

    @cached_property
    def x3(self) -> Tensor:
        return self._random(2, 6, 16)

    @cached_property
    def w3(self) -> Tensor:
        return self._random(2, 16, 10)

    @cached_property
    def added3(self) -> Tensor:
        return self._random(2, 6, 10)

    @cached_property
    def heads(self) -> Tensor:
        return self._random(1, 2, 6, 16)

    @cached_property
    def form(self) -> Tensor:
        return self._random(5, 16, 16)

    @cached_property
    def column(self) -> Tensor:
        return self._random(6)

    def empty(self, *shape: int) -> Tensor:
        return self.place(torch.zeros(*shape))


OpVariant = Callable[[Operands], Tensor]

MATMULS: dict[str, OpVariant] = {
    "@": lambda o: o.x @ o.w,
    "matmul": lambda o: torch.matmul(o.x, o.w),
    "matmul, 3-d": lambda o: torch.matmul(o.x3, o.w),
    "matmul, batched": lambda o: torch.matmul(o.x3, o.w3),
    "matmul, 4-d": lambda o: torch.matmul(o.heads, o.w),
    "matmul, broadcast": lambda o: torch.matmul(o.x, o.w3),
    "matmul, out": lambda o: torch.matmul(o.x, o.w, out=o.empty(6, 10)),
    "matrix @ vector": lambda o: o.x @ o.v,
    "vector @ matrix": lambda o: o.v @ o.w,
    "vector @ vector": lambda o: o.v @ o.v,
    "mm": lambda o: torch.mm(o.x, o.w),
    "mm, out": lambda o: torch.mm(o.x, o.w, out=o.empty(6, 10)),
    "mm, dtype": lambda o: o.x @ o.w if o.x.device.type == "cpu" else torch.ops.aten.mm.dtype(o.x, o.w, torch.float32),
    "addmm": lambda o: torch.addmm(o.added, o.x, o.w),
    "addmm, bias": lambda o: torch.addmm(o.bias, o.x, o.w),
    "addmm, scaled": lambda o: torch.addmm(o.added, o.x, o.w, beta=0.5, alpha=2.0),
    "addmm, out": lambda o: torch.addmm(o.added, o.x, o.w, out=o.empty(6, 10)),
    "addmm_": lambda o: o.added.clone().addmm_(o.x, o.w),
    "bmm": lambda o: torch.bmm(o.x3, o.w3),
    "bmm, out": lambda o: torch.bmm(o.x3, o.w3, out=o.empty(2, 6, 10)),
    "baddbmm": lambda o: torch.baddbmm(o.added3, o.x3, o.w3),
    "baddbmm, out": lambda o: torch.baddbmm(o.added3, o.x3, o.w3, out=o.empty(2, 6, 10)),
    "baddbmm_": lambda o: o.added3.clone().baddbmm_(o.x3, o.w3),
    "addbmm": lambda o: torch.addbmm(o.added, o.x3, o.w3),
    "mv": lambda o: torch.mv(o.x, o.v),
    "mv, out": lambda o: torch.mv(o.x, o.v, out=o.empty(6)),
    "addmv": lambda o: torch.addmv(o.column, o.x, o.v),
    "dot": lambda o: torch.dot(o.v, o.v),
    "vdot": lambda o: torch.vdot(o.v, o.v),
    "inner": lambda o: torch.inner(o.x, o.weight),
    "tensordot": lambda o: torch.tensordot(o.x3, o.w, 1),
    "einsum": lambda o: torch.einsum("bik,kj->bij", o.x3, o.w),
    "einsum, batched": lambda o: torch.einsum("bik,bkj->bij", o.x3, o.w3),
    "linear": lambda o: F.linear(o.x, o.weight),
    "linear, bias": lambda o: F.linear(o.x, o.weight, o.bias),
    "linear, 1-d": lambda o: F.linear(o.v, o.weight, o.bias),
    "linear, 3-d": lambda o: F.linear(o.x3, o.weight),
    "linear, 3-d, bias": lambda o: F.linear(o.x3, o.weight, o.bias),
    "multi_dot": lambda o: torch.linalg.multi_dot([o.x, o.w, o.weight]),
    "attention": lambda o: F.scaled_dot_product_attention(o.heads, o.heads, o.heads),
    "attention, causal": lambda o: F.scaled_dot_product_attention(o.heads, o.heads, o.heads, is_causal=True),
}

REDUCTIONS: dict[str, OpVariant] = {
    "mean()": lambda o: o.x.mean(),
    "mean, dim": lambda o: o.x.mean(-1),
    "mean, keepdim": lambda o: o.x.pow(2).mean(-1, keepdim=True),
    "mean, dims": lambda o: o.x3.mean((0, 2)),
    "mean, out": lambda o: torch.mean(o.x, 1, out=o.empty(6)),
    "sum()": lambda o: o.x.sum(),
    "sum, dim": lambda o: o.x.sum(-1),
    "sum, dims": lambda o: o.x3.sum((0, 1)),
    "sum, out": lambda o: torch.sum(o.x, 1, out=o.empty(6)),
    "sum, dtype": lambda o: o.x.sum(1, dtype=torch.float32),
    "nansum": lambda o: torch.nansum(o.x, 1),
    "nanmean": lambda o: torch.nanmean(o.x, 1),
    "trace": lambda o: torch.trace(o.x),
    "cumsum": lambda o: o.x.cumsum(-1),
    "cumsum, dim 0": lambda o: o.x.cumsum(0),
    "cumsum, out": lambda o: torch.cumsum(o.x, 1, out=o.empty(6, 16)),
    "cumsum_": lambda o: o.x.clone().cumsum_(1),
    "logsumexp": lambda o: torch.logsumexp(o.x, -1),
    "logsumexp, keepdim": lambda o: torch.logsumexp(o.x, 0, True),
    "logsumexp, out": lambda o: torch.logsumexp(o.x, 1, out=o.empty(6)),
    "softmax": lambda o: torch.softmax(o.x, -1),
    "softmax, dtype": lambda o: torch.softmax(o.x, -1, dtype=torch.float32),
    "F.softmax": lambda o: F.softmax(o.x, 0),
    "softmax, out": lambda o: torch.softmax(o.x, -1, out=o.empty(6, 16)),
    "log_softmax": lambda o: o.x.log_softmax(-1),
    "log_softmax, dtype": lambda o: torch.log_softmax(o.x, -1, dtype=torch.float32),
    "F.log_softmax": lambda o: F.log_softmax(o.x, -1),
    "softmin": lambda o: F.softmin(o.x, -1),
    "var": lambda o: o.x.var(-1),
    "var, biased": lambda o: o.x.var(-1, correction=0, keepdim=True),
    "std": lambda o: o.x.std(),
    "std_mean": lambda o: torch.std_mean(o.x, 1)[0],
    "var_mean": lambda o: torch.var_mean(o.x, 1)[1],
    "norm": lambda o: o.x.norm(),
    "norm, 1": lambda o: torch.linalg.vector_norm(o.x, 1, dim=-1),
    "norm, 3": lambda o: torch.linalg.vector_norm(o.x, 3, dim=-1, keepdim=True),
    "normalize": lambda o: F.normalize(o.x),
    "rms_norm": lambda o: F.rms_norm(o.x, (16,)),
    "rms_norm, weight": lambda o: F.rms_norm(o.x, (16,), o.v),
    "layer_norm": lambda o: F.layer_norm(o.x, (16,), o.v, o.v),
    "bilinear": lambda o: F.bilinear(o.x, o.x, o.form),
    "l1_loss": lambda o: F.l1_loss(o.x, o.x + 1),
    "kl_div": lambda o: F.kl_div(o.x, o.x.exp(), reduction="sum"),
}
