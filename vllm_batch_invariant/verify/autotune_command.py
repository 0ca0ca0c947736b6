"""``vllm-batch-invariant certificate``: how matmuls and attention are computed on this GPU, and what was compared."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from ..errors import BadSetting
from .arguments import OneLineParser, add_json, at_least, check_reports
from .outcome import NoTestError
from .printing import printable

if TYPE_CHECKING:
    from ..ops.attention.certificate import Certificate
    from ..ops.linear.autotune import TunedSchedule

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _shape(text: str) -> tuple[int, int]:
    n, found, k = text.partition("x")
    if not (found and n.isdigit() and k.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NxK, such as 6144x4096")
    return int(n), int(k)


def add_arguments(parser: OneLineParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(run=run)
    parser.description = (
        "Print how matmuls are computed on this GPU and at which M their bits were compared with those of the "
        "reference, and which kernels serve attention. vLLM makes certificates when it loads a model; with --shape "
        "those of matmuls are made here."
    )
    parser.add_argument("--shape", nargs="+", type=_shape, default=[], metavar="NxK", help="weights to certify now")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the weights of --shape")
    kind = parser.add_mutually_exclusive_group()
    named = partial(kind.add_argument, dest="spec", action="store_const", default="")
    named("--bias", const="bias", help="certify with a bias")
    named("--gated", const="gated", help="certify as a gated MLP's first product, N of both halves")
    parser.add_argument("--rows", type=at_least(1), default=8192, metavar="M", help="certify up to M rows")
    parser.add_argument("--device", type=at_least(0), default=0, metavar="N", help="index of the GPU")
    add_json(parser)


def run(options: argparse.Namespace, parser: OneLineParser) -> int:
    """Run the command; returns the exit status.

    Raises:
        NoTestError: no GPU.
        BadSetting: a GPU that is not there.
    """
    check_reports(parser, options)
    import torch

    if not torch.cuda.is_available():
        raise NoTestError(
            "certificates are of NVIDIA GPUs, and PyTorch sees none here; on a CPU the matmuls of a model are verified "
            "whenever it is loaded, and nothing is kept to print"
        )
    if options.device >= torch.cuda.device_count():
        raise BadSetting(f"--device {options.device}: this machine has {torch.cuda.device_count()} GPUs.")
    from ..ops.attention import certificate as attention
    from ..ops.linear import cuda, prepare
    from ..ops.linear.spec import NAMED

    for n, k in options.shape:
        weight = torch.empty(n, k, dtype=getattr(torch, _DTYPES[options.dtype]), device=f"cuda:{options.device}")
        prepare(weight, options.rows, NAMED[options.spec])
    environment, gemms = cuda.known(options.device)
    of_attention = attention.known(options.device)
    if options.json:
        matmuls = {name: {bucket: tuned.to_json() for bucket, tuned in found.items()} for name, found in gemms.items()}
        found = {"gpu": environment, "matmuls": matmuls}
        found["attention"] = {name: asdict(certificate) for name, certificate in of_attention.items()}
        options.json.write(options, 0, found)
    _print(environment, gemms, of_attention)
    return 0


def _print(
    environment: dict[str, str], gemms: dict[str, dict[int, "TunedSchedule"]], attention: "dict[str, Certificate]"
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from .printing import consoles

    console, _ = consoles()
    for name, value in environment.items():
        console.print(printable(f"{name}: {value}"), highlight=False, markup=False)
    if not gemms:
        console.print("No certificate yet: load a model with VLLM_BATCH_INVARIANT=1, or name weights with --shape.")
    for name, found in gemms.items():
        table = Table(
            "rows up to",
            "served by",
            "us",
            "us in Triton",
            "bits equal at",
            "refused",
            title=escape(printable(f"Matmul {name}")),
        )
        for bucket, tuned in sorted(found.items()):
            schedule = tuned.schedule
            served = schedule.about if schedule else "Triton"
            times = [
                f"{tuned.microseconds[key]:.1f}" if key in tuned.microseconds else ""
                for key in (tuned.served_by.lower(), "triton")
            ]
            checked = ", ".join(map(str, tuned.checked))
            refused = ", ".join(tuned.refused) or "none"
            table.add_row(*(escape(printable(cell)) for cell in (str(bucket), served, *times, checked, refused)))
        console.print(table)
    for name, certificate in attention.items():
        line = f"Attention of {name}: {certificate.kernels}, {certificate.elements} outputs with equal bits"
        console.print(printable(line), highlight=False, markup=False)
