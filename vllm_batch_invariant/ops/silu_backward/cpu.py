"""The gradient of ``silu(gate) * up`` on a CPU, by PyTorch's operations."""

import torch

from ..pointwise import elementwise


def silu_and_mul_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    gate, up = x.float().chunk(2, dim=-1)
    grad = grad.float()
    sigmoid = elementwise("sigmoid", gate)
    silu = gate * sigmoid
    of_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((of_gate, grad * silu), dim=-1).to(x.dtype)
