"""What a rank of vLLM's pipeline makes of the layers it is told of: the same as every other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import UnsupportedError
from kvcore.model.spec import LayerGroup
from kvcore_vllm.describe import _stages, _whole_group


def told(layers: range, name: str = "model.layers.{}.self_attn.attn") -> LayerGroup:
    """A group as `describe` makes it of what one rank, or the scheduler, hears of."""
    names = tuple(name.format(layer) for layer in layers)
    return LayerGroup(0, 32, tuple(range(len(layers))), names)


def config(layers: int, size: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=size),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
    )


@pytest.mark.parametrize(("layers", "size"), [(4, 2), (5, 2), (7, 3), (32, 4)])
def test_all_ranks_and_the_scheduler_describe_the_same(layers: int, size: int) -> None:
    stages = _stages(config(layers, size))
    assert [start for start, _ in stages] == [0, *(stop for _, stop in stages[:-1])]
    assert stages[-1][1] == layers
    made = {_whole_group([told(range(*stage))], stages) for stage in stages}
    assert made == {told(range(layers))}


def test_one_stage_is_none() -> None:
    assert _stages(config(4, 1)) == ()


@pytest.mark.parametrize(
    "groups",
    [
        [told(range(2)), LayerGroup(1, 32, (), ())],
        [told(range(1))],
        [told(range(1, 3))],
        [told(range(0, 4, 2))],
        [LayerGroup(0, 32, (0, 1), ("model.layers.0.attn", "model.layers.1.other"))],
        [LayerGroup(0, 32, (), ())],
    ],
    ids=["two groups", "half a stage", "across", "with holes", "unlike names", "no layers"],
)
def test_a_stage_that_does_not_tell_of_the_others_is_not_served(groups: list[LayerGroup]) -> None:
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=2"):
        _whole_group(groups, ((0, 2), (2, 4)))
