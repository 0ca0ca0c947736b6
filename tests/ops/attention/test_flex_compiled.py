"""FlexAttention on a GPU is compiled, whatever the mode does to compiled functions of others."""

import pytest
import torch

from vllm_batch_invariant import batch_invariant_mode

flex_cuda = pytest.importorskip("vllm_batch_invariant.ops.attention.flex.cuda")


def test_it_is_compiled_in_the_mode_and_other_functions_are_not(monkeypatch):
    compiled, compile_with = [], torch.compile

    def watch(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend=watch))
    monkeypatch.setattr(flex_cuda.Scores, "attend", lambda self, *arguments: (arguments[0] * 2, arguments[1] * 2))
    attend = flex_cuda._compiled.__wrapped__(flex_cuda.Scores(None, 1, 16, 16, 16, 1.0, None, None))
    arguments = [torch.ones(4) for _ in range(7)]
    with batch_invariant_mode():
        torch.compile(lambda x: x * 3)(arguments[0])
        assert not compiled
        attend(*arguments, None, None)
        assert len(compiled) == 1
