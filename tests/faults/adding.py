"""Operations whose bits depend on the number of rows on purpose: what a bisection must name.

Each copies, and in a batch of more than so many rows moves the last element of each row by one unit in the last place.
"""

import torch

LIBRARY = torch.library.Library("injected", "FRAGMENT")
LIBRARY.define("copy(Tensor x, int most) -> Tensor")
LIBRARY.define("copy_into(Tensor(a!) out, Tensor x, int most) -> ()")


def nudge(x: torch.Tensor, most: int) -> None:
    """Move the last element of each row one unit in the last place, through memory that the dispatcher does not see."""
    if x.shape[0] > most:
        numbers = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
        if x.is_cuda:
            from tests.faults.kernel import nudge as nudge_on_gpu

            nudge_on_gpu(numbers)
        else:
            numbers.numpy()[:, -1] += 1


def _copy(x: torch.Tensor, most: int) -> torch.Tensor:
    out = x.clone()
    nudge(out, most)
    return out


def _copy_into(out: torch.Tensor, x: torch.Tensor, most: int) -> None:
    out.copy_(x)
    nudge(out, most)


for name, function in (("copy", _copy), ("copy_into", _copy_into)):
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, device)
