"""A client of a server without an engine, so that the test decides what it sends."""

from __future__ import annotations

import struct

from kvcore.config import Config
from kvcore.connector.step_transport import Outbox
from kvcore.model.keys import KEY_BYTES
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.server import messages as m
from kvcore.server.client import RemoteManager, join_server
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, UnitTable
from support.transfers import save_blocks

SHAPE = BlockShape(2, 2, 8, 16, "float32")
MODEL = m.Model.of(SHAPE, b"fingerprint-0001")
DESCRIBED = ModelDescription(SHAPE, (LayerGroup(0, 16, (0, 1)),), MODEL.fingerprint, 1)
SPACE = b"n" * KEY_BYTES


def keys(count: int, seed: int = 0) -> list[bytes]:
    return [struct.pack("<QQ", seed, i + 1) for i in range(count)]


def units(start: int, stop: int) -> list[UnitTable]:
    return [UnitTable(16, 1, bytes(8 * (stop - start)))]


def join(config: Config, model: ModelDescription = DESCRIBED) -> tuple[RemoteManager, Outbox]:
    outbox = Outbox()
    return join_server(config, model, outbox, Metrics()), outbox


def save(manager: RemoteManager, names: list[bytes], space: bytes = SPACE) -> None:
    graph = save_blocks(manager, names, space, len(names), units)
    assert graph is not None
    manager.complete(OpReport(graph.graph_id, 0))
