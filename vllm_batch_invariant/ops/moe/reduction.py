"""What decides the bits of a mixture of experts."""

from dataclasses import dataclass

import torch

from ...errors import NotCovered
from ..quantise.reduction import E4M3, QuantiseReduction
from ..scaled_linear.reduction import GROUP, ScaledLinearReduction

SCORING = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul")
UNGATED = ("", "relu2_no_mul")
"""Activations of products that no up is multiplied with."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MoeReduction:
    """The reduction of one layer: a function of the model alone.

    Scores are computed in fp32 from logits that are converted exactly, softmax as the operation of that name says.
    Experts are compared by score plus bias, and of equal ones the lowest comes first; with groups only those of the
    best groups are, where a group stands for its best expert, or with a bias for the sum of its best two. Weights are
    added from the best expert on to renormalise them.

    The GEMMs are those of the operation ``linear``: what they give is rounded to ``dtype``, and so is what the
    activation gives. What down gives is multiplied by the weight in ``accumulate``, the products are added from the
    best expert on, starting with 0, and the sum is rounded once. With a part of the experts the sum is that of theirs.

    With ``products`` both GEMMs are those of the operation ``scaled_linear``, of codes of e4m3 in blocks or in rows.
    What they are given are the codes of the operation ``quantise``, by groups of 128 beside blocks and of a whole row
    beside rows, there by a given scale if the checkpoint has one: those of a token, the same for all its experts, and
    those of what the activation gives, after it was rounded.

    Adapters of low rank are added to what both products give, after it was rounded, as :class:`..lora.LoraReduction`
    says: to that of gate and up before the activation, to that of down before it is multiplied by the weight.

    Attributes:
        num_experts: of the layer, wherever they are.
        top_k: experts of a token.
        dtype: of tokens and experts.
        scoring: "softmax" or "sigmoid".
        renormalise: whether the weights of a token are divided by their sum.
        groups: in which experts are, each of as many neighbours.
        top_groups: whose experts are compared.
        scale: a factor of all weights.
        activation: of the gate, with its product by up: "silu" and "gelu" (exact, or by tanh) are rounded to ``dtype``
            before that product, "swigluoai" (clamped, gpt-oss's) is rounded after it. "relu2_no_mul" is of experts that
            have no gate: the square of what is above 0 of up, rounded once.
        products: of the codes of experts that are stored as e4m3 in blocks of 128 x 128 or with a scale a row, and of
            tokens; None: the GEMMs are of matrices.

    Raises:
        NotCovered: by the constructor: a dtype, scores, an activation or products without a definition.
        ValueError: by the constructor: numbers that do not fit.
    """

    num_experts: int
    top_k: int
    dtype: torch.dtype
    scoring: str = "softmax"
    renormalise: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    activation: str = "silu"
    products: ScaledLinearReduction | None = None

    def __post_init__(self) -> None:
        for what, value, known in (
            ("a mixture of experts in", self.dtype, _DTYPES),
            ("experts chosen by", self.scoring, SCORING),
            ("experts with the activation", self.activation, ACTIVATIONS),
        ):
            if value not in known:
                names = ", ".join(str(name).removeprefix("torch.") for name in known)
                raise NotCovered(
                    f"{what} {str(value).removeprefix('torch.')}",
                    f"it is defined for {names}",
                    "serve another model, no setting helps",
                )
        of = self.products
        if of is not None and (of.codes != E4M3 or of.dtype != self.dtype):
            raise NotCovered(
                f"experts whose products are {of}",
                "they are defined for codes of e4m3, and results of tokens' dtype",
                "serve another model, no setting helps",
            )
        if of is not None and self.activation == "swigluoai":
            raise NotCovered(
                "experts in FP8 whose rows are those of gate and up in turn",
                f"a block of {GROUP} rows has one scale for both"
                if of.in_blocks
                else "nobody has compared their products",
                "serve a checkpoint of which the weights alone are quantised",
            )
        if not 0 < self.top_groups <= self.groups or self.num_experts % self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups of {self.num_experts} experts")
        if not 0 < self.top_k <= self.num_experts // self.groups * self.top_groups:
            raise ValueError(
                f"a token cannot have {self.top_k} of {self.num_experts} experts in {self.top_groups} of "
                f"{self.groups} groups"
            )

    @property
    def accumulate(self) -> torch.dtype:
        """The dtype of scores, weights and sums."""
        return torch.float32

    @property
    def is_gated(self) -> bool:
        """Whether the first product has rows of a gate beside those of up."""
        return self.activation not in UNGATED

    @property
    def quantised(self) -> QuantiseReduction | None:
        """How rows become the codes of ``products``; None: they stay."""
        if self.products is None:
            return None
        return QuantiseReduction.of_dtype(self.dtype, E4M3, GROUP if self.products.in_blocks else None)
