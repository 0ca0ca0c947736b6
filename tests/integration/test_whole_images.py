"""Tokens that see all of their image: where a step may end, and what attention is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.integration.engine.whole_images import tokens_of_step
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.attention import NO_RANGE

pytest.importorskip("vllm")

from vllm.multimodal.inputs import PlaceholderRange


def item(first: int, length: int, modality: str = "image") -> SimpleNamespace:
    return SimpleNamespace(modality=modality, mm_position=PlaceholderRange(first, length))


@pytest.mark.parametrize(
    ("computed", "fit", "step"),
    [
        (0, 200, 200),  # before the first image, and behind it
        (0, 100, 100),
        (0, 101, 100),
        (0, 149, 100),
        (0, 150, 150),
        (100, 49, 0),  # an image that begins with the step, or before it
        (100, 50, 50),
        (120, 20, 0),
        (120, 30, 30),
        (120, 100, 80),  # and then another one
        (150, 51, 50),
        (0, 400, 400),
    ],
)
def test_a_step_ends_before_the_image_that_does_not_fit(computed: int, fit: int, step: int) -> None:
    assert tokens_of_step([item(100, 50), item(200, 50), item(390, 80, "audio")], computed, fit) == step


@pytest.mark.parametrize(
    ("fit", "step"), [(100, 100), (101, 101), (110, 101), (112, 112), (115, 113), (122, 113), (123, 123)]
)
def test_a_step_ends_between_the_frames_of_a_video(fit: int, step: int) -> None:
    frame = [False, *[True] * 10, False]
    film = PlaceholderRange(100, 24, torch.tensor([*frame, *frame]))
    assert tokens_of_step([SimpleNamespace(modality="video", mm_position=film)], 0, fit) == step


def test_the_scheduler_is_given_fewer_tokens_where_a_model_needs_it() -> None:
    scheduler: Any = patch_points.SCHEDULER.get()
    schedule_items = scheduler._try_schedule_encoder_inputs
    given = []

    class Plain:
        @staticmethod
        def _try_schedule_encoder_inputs(_: Any, request: Any, computed: int, new: int, *others: Any) -> None:
            given.append((computed, new, *others))

    with pytest.MonkeyPatch.context() as patch:
        from vllm_batch_invariant.integration.engine import whole_images

        patch.setattr(scheduler, "_try_schedule_encoder_inputs", Plain._try_schedule_encoder_inputs)
        whole_images.install()
        for needs in (True, False):
            own = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=needs)))
            request = SimpleNamespace(mm_features=[item(100, 50)])
            scheduler._try_schedule_encoder_inputs(own, request, 100, 20, 7)
    assert given == [(100, 0, 7), (100, 20, 7)]
    assert scheduler._try_schedule_encoder_inputs is schedule_items


def batch(images: dict[int, list[tuple[int, int]]] | None) -> SimpleNamespace:
    """A request of 6 tokens behind 4, one of 3 whose first they are, and rows of padding."""
    known = {"query_start_loc_cpu": torch.tensor([0, 6, 9]), "seq_lens_cpu_upper_bound": torch.tensor([10, 3])}
    return SimpleNamespace(**known, num_actual_tokens=11, mm_req_doc_ranges=images)


def test_attention_is_told_the_range_of_each_token() -> None:
    from vllm_batch_invariant.integration.layers.attention import ranges_of

    images, none = {0: [(1, 2), (3, 5), (7, 8)], 1: [(0, 2)]}, [*NO_RANGE]
    found = ranges_of(batch(images))
    assert found is not None
    assert found.tolist() == [
        [3, 5], [3, 5], none, [7, 8], [7, 8], none, [0, 2], [0, 2], [0, 2], none, none
    ]  # fmt: skip
    for without in (None, {}, {0: [], 1: []}, {0: [(0, 3)]}, {0: [(10, 12)]}):
        assert ranges_of(batch(without)) is None
    with pytest.raises(RuntimeError, match="a step ends at position 10 inside an image of positions 8 to 10"):
        ranges_of(batch({0: [(8, 10)]}))


def test_a_window_cuts_what_a_token_sees_of_its_image_before_it() -> None:
    from vllm_batch_invariant.integration.layers.attention import ranges_of

    images, none = {0: [(3, 9)], 1: [(0, 2)]}, [*NO_RANGE]
    found = ranges_of(batch(images), window=3)
    assert found is not None
    assert found.tolist() == [
        [3, 9], [3, 9], [4, 9], [5, 9], [6, 9], [7, 9], [0, 2], [0, 2], [0, 2], none, none
    ]  # fmt: skip


def test_layers_without_a_window_see_nothing_behind_a_token_where_others_cut_images() -> None:
    from vllm_batch_invariant.integration.layers.attention import _of_images

    def layer(cuts: bool, window: int | None, reads: str | None = None) -> SimpleNamespace:
        impl = SimpleNamespace(spec=SimpleNamespace(sliding_window=window))
        return SimpleNamespace(mm_prefix_clamp_sliding_window=cuts, kv_sharing_target_layer_name=reads, impl=impl)

    cutting = {"near": layer(True, 48), "far": layer(False, None), "of a drafter": layer(False, 48, reads="near")}
    assert _of_images(["near"], cutting) == _of_images(["of a drafter", "near"], cutting) == (True, 48)
    assert _of_images(["far"], cutting) == _of_images(["of a drafter"], cutting) == (False, None)
    with pytest.raises(ValueError, match="too many values"):
        _of_images(["near", "far"], cutting)
    assert _of_images(["near"], {"near": layer(False, 48), "far": layer(False, None)}) == (True, None)


def test_a_cuda_graph_finds_the_ranges_of_each_step_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a step without images; a graph of decode reads none."""
    from vllm_batch_invariant.integration.layers.attention_cuda import PlannedMetadataBuilder

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which a CPU has none of
    builder = PlannedMetadataBuilder.__new__(PlannedMetadataBuilder)
    builder._no_range = torch.tensor([NO_RANGE], dtype=torch.int32)
    builder._ranges = builder._no_range.repeat(8, 1)
    images = torch.tensor([[3, 5], [3, 5], NO_RANGE], dtype=torch.int32)
    kept = builder._kept(images, 3, 3)
    assert kept is not None
    assert kept.data_ptr() == builder._ranges.data_ptr()
    assert torch.equal(builder._ranges[:3], images)
    assert builder._kept(None, 2, 2) is not None
    assert builder._ranges.tolist() == [[*NO_RANGE]] * 8
    assert builder._kept(None, 2, 1) is None
    builder._ranges = None
    assert builder._kept(None, 3, 3) is None


@pytest.mark.parametrize("sees_ranges", [False, True])
def test_steps_with_ranges_are_compared_at_start_of_a_model_that_has_some(
    sees_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_batch_invariant.integration.layers.attention_cuda import PlannedMetadataBuilder
    from vllm_batch_invariant.ops.attention import AttentionSpec, certificate, plan

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(certificate, "certify", lambda *given: asked.append(given) or SimpleNamespace(kernels=None))
    monkeypatch.setattr(plan, "Planner", lambda *_, **__: None)
    monkeypatch.setattr(PlannedMetadataBuilder, "_sizes", lambda *_: ("shape", 2, 9, 40))
    layer = SimpleNamespace(impl=SimpleNamespace(num_heads=8, spec=AttentionSpec(1.0), holds_codes=False))
    layer.impl.planned_as = (8, None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=sees_ranges),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        num_speculative_tokens=0,
        speculative_config=None,
    )
    PlannedMetadataBuilder(SimpleNamespace(block_size=64), ["layer"], config, torch.device("cpu"))
    assert asked == [("shape", torch.device("cpu"), 64, (AttentionSpec(1.0),), 1, sees_ranges)]
