"""Settings of what goes beyond one engine: its events."""

from __future__ import annotations

from pydantic import Field

from kvcore.schema_base import Name, SchemaModel, Seconds, Size, parse_size

__all__ = ["EventsConfig"]


class EventsConfig(SchemaModel):
    """Block events for routers and other consumers. Off unless `endpoint` or `nats` is set."""

    endpoint: Name | None = Field(
        default=None,
        description="ZMQ endpoint to publish at, in the format of vLLM's KV events. "
        '"tcp://*:5557" and "ipc:///path" are bound, others connected to; whoever reaches it can '
        "read which blocks are held, so bind it where routers alone are. Unset: not over ZMQ.",
    )
    replay_endpoint: Name | None = Field(
        default=None,
        description="ZMQ endpoint to bind for consumers that missed something. Without it they "
        "cannot catch up.",
    )
    topic: Name = Field(
        default="kvcore", description="Topic of this engine's events; give each engine its own."
    )
    nats: Name | None = Field(
        default=None,
        description='Address of a NATS server with JetStream, as "nats://host:4222". Unset: not '
        "over NATS.",
    )
    nats_stream: Name = Field(
        default="KVCORE",
        description="JetStream stream of the subjects `kvcore.events.TOPIC`; made, with 256 MiB "
        "and an hour as its limits, if missing.",
    )
    interval_s: Seconds = Field(
        default=0.02, description="Seconds between two sendings: events in between go together."
    )
    queue_blocks: int = Field(
        default=262_144,
        ge=1024,
        description="Blocks whose events may wait to be sent. When there are more, those that wait "
        "are dropped and counted, and consumers catch up by a snapshot.",
    )
    history_max: Size = Field(
        default=parse_size("64MiB"),
        description="Bytes of batches kept for consumers that missed some.",
    )
    heartbeat_s: Seconds = Field(
        default=5.0,
        description="Seconds after which an empty batch says that nothing has happened.",
    )
