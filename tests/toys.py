"""A toy of each axis: the files that it adds to the package, and its edits of files that are there."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Toy:
    """What somebody writes.

    Attributes:
        files: that are new, by their names in the package.
        edits: of others, by their names: what is replaced, which stands there once, and by what.
    """

    files: dict[str, str] = field(default_factory=dict)
    edits: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Of the files that are touched."""
        return {*self.files, *self.edits}

    def add(self, folder: Path) -> None:
        """Write it to a copy of the package, or to another folder."""
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.lstrip())
        for name, changes in self.edits.items():
            text = (folder / name).read_text()
            for before, after in changes:
                assert text.count(before) == 1, (name, before)
                text = text.replace(before, after)
            (folder / name).write_text(text)


OPERATION = Toy(
    {
        "ops/largest/__init__.py": '''
"""The largest element of each row."""

from ..dispatch import implementation


def largest(x):
    return implementation("largest", x).largest(x)
''',
        "ops/largest/reduction.py": '''
from dataclasses import dataclass


@dataclass(frozen=True)
class LargestReduction:
    """A maximum is exact in any order."""
''',
        "ops/largest/reference.py": """
def largest(x):
    return x.double().amax(-1)
""",
        "ops/largest/cpu.py": """
def largest(x):
    return x.amax(-1)
""",
    },
    {"ops/dispatch.py": (('    "linear": (', '    "largest": ("cpu",),\n    "linear": ('),)},
)
DEVICE = Toy(
    {
        "toy_device/__init__.py": """
from vllm_batch_invariant.integration.feature import Feature
from vllm_batch_invariant.ops.devices import Device

DEVICE = Device(
    "toy",
    "PrivateUse1",
    None,
    False,
    name="a toy",
    title="Toy",
    aten="toy_device.aten",
    vllm="toy_device.vllm",
    operations={"softmax": "toy_device.softmax", "norm": "toy_device.norm"},
    reductions="toy_device.reductions",
    coverage="toy_device",
    install="install the toys",
)
COVERED = (Feature("Toy", "a test"),)
REFUSED = (Feature("Toys with gadgets", "they rattle", "take them off", lambda config: config.gadget, ("toy",)),)
""",
        "toy_device/softmax.py": """
def softmax(x, dim, *, dtype=None):
    print("toy softmax of", list(x.shape))
    return x
""",
        "toy_device/norm.py": """
import no_such_library
""",
        "toy_device/reductions.py": """
from vllm_batch_invariant.ops.softmax import SoftmaxReduction


def softmax(length, dtype):
    return SoftmaxReduction(length=length, dtype=dtype, exp="toy exp", lanes=3)
""",
        "toy_device/aten.py": """
from vllm_batch_invariant.aten.overrides import OVERRIDES, DeviceOverrides

DEVICE = DeviceOverrides(OVERRIDES)
""",
        "toy_device/vllm.py": """
from vllm_batch_invariant.integration.devices.record import VllmDevice

from . import DEVICE as TOY

DEVICE = VllmDevice(TOY, "toy_device.attention.Backend", ("CUSTOM",), serving="Toys.")
""",
        "toy_device-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy_device\nVersion: 1.0\n",
        "toy_device-1.0.dist-info/entry_points.txt": "[vllm_batch_invariant.devices]\ntoy = toy_device:DEVICE\n",
    }
)
"""A distribution as an installer leaves it."""
FORMAT = Toy(
    {
        "ops/formats/signs.py": """
import torch

from .record import Format


def encode(weight):
    return (weight > 0).to(torch.uint8), weight.abs().amax(1, keepdim=True)


def decode(stored, out):
    return out.copy_((2.0 * stored[0] - 1) * stored[1])


SIGNS = Format("signs", (torch.uint8, torch.float32), exponents=16, encode=encode, decode=decode)
"""
    },
    {
        "ops/formats/__init__.py": (
            ("from .record import Format\n", "from .record import Format\nfrom .signs import SIGNS\n"),
            ("FORMATS = (PLAIN, ", "FORMATS = (PLAIN, SIGNS, "),
        )
    },
)
EPILOGUE = Toy(
    edits={
        "ops/linear/spec.py": (
            (
                "EPILOGUES = NONE, BIAS, SWIGLU",
                'SQUARED = Epilogue("squared", operation=("silu", "square"), definition=lambda product: product**2)\n'
                'CROOKED = Epilogue("crooked", operation=("silu", "square"), definition=lambda product: -product)\n'
                "EPILOGUES = NONE, BIAS, SWIGLU, SQUARED, CROOKED",
            ),
        ),
        "ops/silu/cpu.py": (
            (
                "from ..pointwise import elementwise\n",
                "from ..pointwise import elementwise\n\n\ndef square(x):\n    return x * x\n",
            ),
        ),
    }
)
"""The square of a product, and one that is defined otherwise than it is computed."""
ATTENTION = Toy(
    edits={
        "ops/attention/params.py": (
            ("    causal: bool = True\n", "    causal: bool = True\n    falloff: float | None = None\n"),
            ("ADDED = {\n", 'ADDED = {\n    "falloff": Added("falloff {:g}", lambda _: 0.5),\n'),
        ),
        "ops/attention/reference.py": (
            ("SERVES = (", 'SERVES = ("falloff", '),
            (
                "    qk = qk.masked_fill(",
                "    if spec.falloff is not None:\n"
                "        qk = qk - spec.falloff * distance.clamp(0).sqrt()\n"
                "    qk = qk.masked_fill(",
            ),
        ),
        "ops/attention/cpu_kernel.py": (
            ("SERVES = (", 'SERVES = ("falloff", '),
            (
                '    """[query_heads] fp32, empty for none."""\n',
                '    """[query_heads] fp32, empty for none."""\n    falloff: np.float32\n',
            ),
            (
                "            sinks.numpy(),\n",
                "            sinks.numpy(),\n            np.float32(spec.falloff or 0),\n",
            ),
            (
                "    # Whole vectors from here on",
                "    if score_mod.falloff != np.float32(0.0):\n"
                "        for key in range(seen.size):\n"
                "            seen[key] -= score_mod.falloff * np.sqrt(np.float32(-(distance + low + key)))\n"
                "    # Whole vectors from here on",
            ),
        ),
    }
)
"""A score falls with the root of the distance between query and key."""
LAYER = Toy(
    {
        "integration/layers/gated_norm.py": """
from ...ops.norm import rms_norm
from ...ops.silu import silu_and_mul
from ..reviews import patch_points


def install():
    patch_points.replace_layer(patch_points.GATED_NORM.get(), "BatchInvariant", forward)


def forward(self, x, z=None):
    return rms_norm(x, self.weight.data, self.eps)
"""
    },
    {
        "integration/reviews/patch_points.py": (
            (
                "CUSTOM_OP = ",
                'GATED_NORM = PatchPoint(("vllm.model_executor.layers.layernorm",), "RMSNormGated")\nCUSTOM_OP = ',
            ),
        ),
        "integration/devices/record.py": (
            ("        norm.install()\n", "        norm.install()\n        gated_norm.install()\n"),
            ("from ..layers.fusion ", "from ..layers import gated_norm\nfrom ..layers.fusion "),
        ),
    },
)
"""vLLM's norm of layers of linear attention, which is known nowhere."""
SETTING = Toy(
    edits={
        "integration/coverage.py": (
            (
                "COVERED = (\n",
                'COVERED = (\n    Feature("Turns", "by length", drawn={"turns": {"short": ("--turns", "short")}}),\n',
            ),
            (
                "REFUSED = (\n",
                'REFUSED = (\n    Feature("Turns beside drafts", "toys do not", "leave --turns out", '
                'turns_beside_drafts, arguments=("--turns",)),\n',
            ),
            (
                "\nCOVERED = (\n",
                "\ndef turns_beside_drafts(config):\n"
                '    return _when(config.speculative_config, "turns beside drafts")\n\n\nCOVERED = (\n',
            ),
        ),
        "integration/reviews/fields.toml": (
            ("[fields.SchedulerConfig]\n", '[fields.SchedulerConfig]\ndefault_only = { turns = ["short"] }\n'),
        ),
    }
)
"""Which of the requests that wait comes next."""
VERSION = Toy(
    edits={
        "integration/reviews/patch_points.py": (
            (
                '(("vllm.v1.core.sched.interface",), "PauseState")',
                '(("vllm.v1.core.sched.pausing", "vllm.v1.core.sched.interface"), "PauseState")',
            ),
        ),
        "integration/reviews/fields.toml": (
            ('    "runner_type is_multimodal_model",\n', '    "runner_type is_multimodal_model turns",\n'),
        ),
        "integration/reviews/variables.toml": (("[known]\n", '[known]\n"a toy" = ["VLLM_TURNS"]\n'),),
        "integration/reviews/functions.toml": (
            ('"Sampler.greedy_sample" = [', '"Sampler.greedy_sample" = ["DIGEST", '),
        ),
    }
)
"""What is read of the next vLLM. The record and its page are written by the command."""
