"""Loads of a step are cut into layers only where the forward waits for layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from kvcore.config import load_config
from kvcore_vllm.build import loads_layerwise
from support.vllm_leader import PAGES, LeaderRig


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("mode", [None, *CUDAGraphMode])
def test_full_graphs_wait_for_whole_loads(mode: Any, wanted: bool) -> None:
    config = load_config(overrides={"vllm": {"layerwise": wanted}}, env={})
    vllm_config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode), speculative_config=None
    )
    full = mode is not None and "FULL" in mode.name
    assert loads_layerwise(config, vllm_config, None) == (wanted and not full)
    vllm_config.speculative_config = SimpleNamespace(method="ngram")
    assert loads_layerwise(config, vllm_config, None) == (wanted and not full)
    vllm_config.speculative_config = SimpleNamespace(method="mtp", draft_model_config=object())
    assert not loads_layerwise(config, vllm_config, None), "the draft's forwards wait for no layer"


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_load_of_a_step_is_cut_only_if_the_forward_waits_by_layer(layerwise: bool) -> None:
    rig = LeaderRig(layerwise=layerwise)
    keys = rig.chain.keys
    lifecycle = rig.index.lifecycle
    lifecycle.commit(lifecycle.reserve("host", keys, 0, len(keys), rig.space))
    tokens, between_steps = rig.ask("r")
    assert not between_steps
    rig.side.update_state_after_alloc(rig.requests["r"], PAGES, tokens)
    [graph] = rig.side._plan.sync_loads
    assert (len(graph.ops) > 1) == layerwise
