"""Composes TensorRT-LLM's leader and worker from a config: this module knows every part."""

from __future__ import annotations

import logging
from typing import Any

from kvcore.config import Config
from kvcore.connector import build
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.connector.fusion_worker import PromisedFusionWorker
from kvcore.connector.step_transport import Outbox
from kvcore.errors import UnsupportedError
from kvcore.explain.recorder import RequestRecorder
from kvcore.worker.lifecycle import refusing_parts
from kvcore_trtllm import engine
from kvcore_trtllm.describe import whole
from kvcore_trtllm.fusion import TrtllmLayers, ropes_of
from kvcore_trtllm.fusion_scheduler import TrtllmFusionScheduler
from kvcore_trtllm.layout import Memory
from kvcore_trtllm.leader import Leader
from kvcore_trtllm.worker import Allgather, Tally, WorkerConnector

_log = logging.getLogger("kvcore.trtllm")


def build_worker_connector(
    config: Config,
    memory: Memory,
    rank: int,
    allgather: Allgather,
    *,
    layerwise: bool,
    llm_args: Any = None,
) -> WorkerConnector:
    """Build the worker of this rank.

    Raises UnsupportedError or LayoutError if KV cannot be copied correctly. Nothing may be stored
    then.
    """
    model = whole(memory.facts, memory.groups, config.block.tokens)
    parts = build.build_worker(config, model, rank, memory.views)
    blends, no_fusion = None, "it is not enabled"
    if config.fusion.enabled:
        try:
            blends, no_fusion = _blends(config, llm_args, memory, parts, rank, allgather), ""
        except UnsupportedError as error:
            no_fusion = str(error)
    return WorkerConnector(
        parts,
        Tally(model.world_size, allgather),
        layers=model.shape.layers,
        layerwise=layerwise,
        blends=blends,
        no_fusion=no_fusion,
    )


def _blends(
    config: Config,
    llm_args: Any,
    memory: Memory,
    parts: build.WorkerParts,
    rank: int,
    allgather: Allgather,
) -> PromisedFusionWorker:
    """Build the fusion worker of this rank. Raises UnsupportedError if fusion cannot be correct."""
    facts = memory.facts
    ropes = ropes_of(llm_args, facts)
    group, view = memory.groups[0], memory.views[0]
    if group.layers != tuple(range(facts.layers)):
        raise UnsupportedError("fusion needs all layers in one group of pages, in their order")
    layers = TrtllmLayers(
        engine.loaded_model(llm_args, rank),
        view,
        engine.rotary_embedding,
        max_rows=getattr(llm_args, "max_num_tokens", None),
        gather=allgather if facts.world_size > 1 else None,
    )
    model = whole(facts, memory.groups, config.block.tokens)
    return build.build_fusion_worker(PromisedFusionWorker, config, model, parts, layers, ropes)


def agree_on_fusion(
    config: Config, side: WorkerConnector, ranks: int, allgather: Allgather
) -> None:
    """Stop blends on every rank unless all ranks can blend. Otherwise prepare them.

    A collective: every rank calls it.
    """
    if not config.fusion.enabled:
        return
    why = side.no_fusion.encode()
    reasons = allgather(why) if ranks > 1 else [why]
    if reason := next(filter(None, reasons), b"").decode():
        _log.warning("exact prefixes only: %s", reason)
        side.refuse_blends(reason)
    else:
        side.warm_up_blends(timed=False)


def refusing_worker_connector(world_size: int, allgather: Allgather) -> WorkerConnector:
    """Build a worker that refuses all work, so that the leader learns of it and stops."""
    return WorkerConnector(
        refusing_parts(),
        Tally(world_size, allgather),
        layers=0,
        layerwise=False,
        no_fusion="a rank cannot move KV",
    )


def build_leader(
    config: Config, memory: Memory, worker: WorkerConnector, *, layerwise: bool = True
) -> Leader:
    """Build the leader over the memory of rank 0. Close it after all ranks have closed.

    ``layerwise`` is that of the workers: only then are loads of a step cut into layers.
    A tier that cannot be used is left out with a warning.
    """
    model = whole(memory.facts, memory.groups, config.block.tokens)
    alone = model.world_size == 1
    outbox = Outbox(pump=worker.pump if alone else None)
    recorder = RequestRecorder.of(config)
    parts = build.build_leader(config, model, outbox, recorder)
    recorder.weigh_alone(
        config,
        model,
        parts.manager,
        parts.read_paths,
        min_load_tokens=config.trtllm.min_load_tokens,
        layerwise=layerwise,
        times_forwards=False,
    )
    if alone:  # the first lookup may read from a tier, before there is any plan
        worker.open(parts.open_tiers)
    fusion = None
    if worker.blends is not None:
        traits = FusionTraits(memory.groups[0].page_tokens)
        fusion = build.build_fusion_scheduler(TrtllmFusionScheduler, config, model, parts, traits)
    leader = Leader(
        config,
        model,
        build.leader_parts(parts, outbox, recorder, fusion),
        outbox,
        open_tiers={} if alone else parts.open_tiers,
        lane=worker.start if alone else None,
        layerwise=layerwise,
    )
    worker.listener = leader.hear
    worker.on_blends = leader.hear_blends
    worker.on_broken = leader.hear_broken
    return leader
