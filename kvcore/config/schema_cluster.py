"""Settings of what goes beyond one engine: its events, and who else is there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcore.config.fields import Name, SchemaModel, Seconds, Size, parse_size

__all__ = ["ClusterConfig", "EventsConfig", "MemberConfig"]


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
    token_ids: bool = Field(
        default=False,
        description="Tell the tokens of stored blocks too, for routers that make keys of their "
        "own from them. They are users' text: whoever reads the events reads it. Not those of "
        "prompts with an adapter, a tenant's salt or images. 4 bytes a token and 150 a block.",
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
    publisher: Literal["process", "thread"] = Field(
        default="process",
        description="Who sends: a process of its own, which leaves the engine's interpreter alone, "
        "or a thread of the engine's. The process has 40 MiB beside what it knows of blocks.",
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


class MemberConfig(SchemaModel):
    """A process of the cluster, one table `[cluster.members.NAME]` for each."""

    kind: Literal["leader", "worker", "server"] = Field(
        default="leader", description="What it is to the others."
    )
    address: str = Field(default="", description="Where it is reached.")
    model: Name = Field(default="any", description="What it serves.")
    group: Name = Field(default="default", description="The nodes it works with.")
    details: dict[str, str] = Field(
        default_factory=dict, description="What else others need to know, as text."
    )


class ClusterConfig(SchemaModel):
    """Who is there: in etcd, or from a list. Off unless `etcd` or `members` is set."""

    etcd: list[Name] = Field(
        default_factory=list,
        description='Endpoints of etcd, as "http://host:2379". Processes are entered under a '
        "lease, and are gone when they are.",
    )
    name: Name | None = Field(
        default=None,
        description="This engine's name among leaders: with `members`, one of theirs. Unset: the "
        "host's name and the process's number.",
    )
    model: Name = Field(
        default="any", description="What this engine serves, in words that others look for."
    )
    group: Name = Field(default="default", description="The nodes this engine works with.")
    ttl_s: int = Field(
        default=10,
        ge=1,
        le=3600,
        description="Seconds after which a process that is gone, or cut off, is taken out.",
    )
    prefix: Name = Field(default="/kvcore", description="Where kvcore's keys lie in etcd.")
    ca_cert: Name | None = Field(
        default=None, description="File of the authority that signed etcd's certificate."
    )
    cert: Name | None = Field(default=None, description="File of the client's certificate.")
    key: Name | None = Field(default=None, description="File of the client's key.")
    members: dict[str, MemberConfig] = Field(default_factory=dict)
