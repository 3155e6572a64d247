"""Settings beyond one engine: block events and the other members of a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvcore._util.addresses import check_open, is_bound
from kvcore.config.fields import (
    FolderPath,
    Name,
    SchemaModel,
    Seconds,
    Size,
    is_socket,
    parse_size,
)
from kvcore.errors import ConfigError

__all__ = ["ClusterConfig", "EventsConfig", "MemberConfig"]


def _endpoint(value: str) -> str:
    if value.startswith("ipc:") and not is_socket(value):
        raise ConfigError(f'given {value!r}; supported are "tcp://HOST:PORT" and "ipc://SOCKET"')
    return value


Endpoint = Annotated[Name, AfterValidator(_endpoint)]


class EventsConfig(SchemaModel):
    """Block events for routers and other consumers. Off unless `endpoint` or `nats` is set."""

    endpoint: Endpoint | None = Field(
        default=None,
        description="ZMQ endpoint to publish at, in the format of vLLM's KV events. "
        '"@tcp://127.0.0.1:5557", "tcp://*:5557" and "ipc:///path" are bound, other addresses are '
        "connected to. An address that other hosts reach needs `keys` or `trusted_network`. Unset: "
        "no events over ZMQ.",
    )
    replay_endpoint: Endpoint | None = Field(
        default=None,
        description="ZMQ endpoint to bind for consumers that missed events. Without it they "
        "cannot catch up.",
    )
    keys: FolderPath | None = Field(
        default=None,
        description="Folder of CURVE keys, made by `kvcore server --keygen FOLDER`. Only consumers "
        "with a key in it are heard. Routers made for vLLM's events have no keys.",
    )
    trusted_network: bool = Field(
        default=False,
        description="Publish without keys at addresses that other hosts reach, because a firewall "
        "or a network policy admits only routers. Whoever else connects can read which blocks are "
        "held, and with `token_ids` users' text.",
    )
    topic: Name | None = Field(
        default=None,
        description="Topic of this engine's events. Give each engine its own. Unset: `kvcore`; "
        "with the format `vllm` none over ZMQ, as vLLM's events have none. vLLM's router hears no "
        "others.",
    )
    format: Literal["kvcore", "vllm"] = Field(
        default="kvcore",
        description="`kvcore` tells tiers by name and blocks by their 16-byte keys. `vllm` tells "
        "media and 8-byte numbers, as vLLM does by default: for routers that read nothing else, "
        "such as Dynamo's. They compute keys of their own, so it needs `token_ids`.",
    )
    token_ids: bool = Field(
        default=False,
        description="Include the tokens of stored blocks, for routers that compute their own keys "
        "from them. The tokens are users' text, readable by anyone who receives the events. "
        "Prompts with an adapter, a tenant's salt or images are left out. Costs 4 bytes per token "
        "and 150 per block.",
    )
    nats: Name | None = Field(
        default=None,
        description='Address of a NATS server with JetStream, such as "nats://host:4222". Unset: '
        "no events over NATS.",
    )
    nats_stream: Name = Field(
        default="KVCORE",
        description="JetStream stream for the subjects `kvcore.events.TOPIC`. If missing, it is "
        "created with limits of 256 MiB and one hour.",
    )
    publisher: Literal["process", "thread"] = Field(
        default="process",
        description="Who sends the events: a separate process, which does not load the engine's "
        "interpreter, or a thread of the engine. The process needs 40 MiB plus its record of the "
        "blocks.",
    )
    interval_s: Seconds = Field(
        default=0.02, description="Seconds between two sends. Events in between are sent together."
    )
    queue_blocks: int = Field(
        default=262_144,
        ge=1024,
        description="Blocks whose events may wait to be sent. Beyond that, the waiting events are "
        "dropped and counted, and consumers catch up with a snapshot.",
    )
    history_max: Size = Field(
        default=parse_size("64MiB"),
        description="Bytes of batches kept for consumers that missed some.",
    )
    heartbeat_s: Seconds = Field(
        default=5.0,
        description="Seconds without events after which an empty batch is sent.",
    )

    @property
    def sent_topic(self) -> str:
        """The topic that is sent; empty for none."""
        return self.topic or ("" if self.format == "vllm" else "kvcore")

    @model_validator(mode="after")
    def _routers_get_tokens(self) -> EventsConfig:
        if self.format == "vllm" and not self.token_ids:
            raise ConfigError(
                'given events.format = "vllm" without events.token_ids: routers that read this '
                "format compute their keys from tokens. Set events.token_ids = true if they may "
                "see the text of users"
            )
        return self

    @model_validator(mode="after")
    def _strangers_are_kept_out(self) -> EventsConfig:
        for name, endpoint in (
            ("endpoint", self.endpoint),
            ("replay_endpoint", self.replay_endpoint),
        ):
            if endpoint is not None and (is_bound(endpoint) or name != "endpoint"):
                check_open(name, endpoint.removeprefix("@"), self.keys, self.trusted_network)
        return self


class MemberConfig(SchemaModel):
    """A process of the cluster: one table `[cluster.members.NAME]` each."""

    kind: Literal["leader", "worker", "server"] = Field(
        default="leader", description="Its role in the cluster."
    )
    address: str = Field(default="", description="Address at which it is reached.")
    model: Name = Field(default="any", description="Model that it serves.")
    group: Name = Field(default="default", description="Group of nodes that it works with.")
    details: dict[str, str] = Field(
        default_factory=dict, description="Further details for the other members, as text."
    )


class ClusterConfig(SchemaModel):
    """Members of the cluster, from etcd or from a list. Off unless `etcd` or `members` is set."""

    etcd: list[Name] = Field(
        default_factory=list,
        description='Endpoints of etcd, such as "http://host:2379". Processes register under a '
        "lease and disappear with it.",
    )
    name: Name | None = Field(
        default=None,
        description="Name of this engine among the leaders. With `members`, it must be one of "
        "theirs. Unset: host name and process id.",
    )
    model: Name = Field(
        default="any", description="Model that this engine serves, as the other members name it."
    )
    group: Name = Field(
        default="default", description="Group of nodes that this engine works with."
    )
    ttl_s: int = Field(
        default=10,
        ge=1,
        le=3600,
        description="Seconds after which a process that has ended, or is cut off, is removed.",
    )
    prefix: Name = Field(default="/kvcore", description="Prefix of kvcore's keys in etcd.")
    ca_cert: Name | None = Field(
        default=None,
        description="File of the certificate authority that signed etcd's certificate.",
    )
    cert: Name | None = Field(default=None, description="File of the client certificate.")
    key: Name | None = Field(default=None, description="File of the client's private key.")
    members: dict[str, MemberConfig] = Field(default_factory=dict)
