"""The settings schema: `Config`, and the tables that have no module of their own.

The ``schema_*`` modules have the other tables: one frozen pydantic model per table, one documented
field per key. The models are strict (no ``"4"`` for an integer) and reject unknown keys. Every
field has a default, so ``Config()`` is valid. ``kvcore.config.load`` builds a `Config` from files,
the environment and an engine's JSON. docs/configuration*.md are made from the schema.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from kvcore.config.fields import DEFAULT, Name, SchemaModel, Source
from kvcore.config.schema_cluster import ClusterConfig, EventsConfig
from kvcore.config.schema_control import (
    ClientsConfig,
    ControlConfig,
    TenantConfig,
    tenant_name,
)
from kvcore.config.schema_engines import SglangConfig, TrtllmConfig, VllmConfig
from kvcore.config.schema_fusion import FusionConfig, PlannerConfig
from kvcore.config.schema_server import ServerConfig
from kvcore.config.schema_telemetry import ExplainConfig, LogConfig, MetricsConfig, TraceConfig
from kvcore.config.schema_tiers import (
    DiskConfig,
    HostConfig,
    PointsConfig,
    TierConfig,
    TransferConfig,
    tier_name,
)
from kvcore.errors import ConfigError

__all__ = ["BlockConfig", "Config", "NamespaceConfig", "OpsConfig", "PluginsConfig"]


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ConfigError(f"given {value}; supported is a power of two")
    return value


class BlockConfig(SchemaModel):
    """The unit of identity, placement and eviction."""

    tokens: Annotated[int, Field(ge=8, le=1024), AfterValidator(_power_of_two)] = Field(
        default=16,
        description="Tokens per token block, a power of two. Smaller blocks reuse more of a "
        "shared prefix but cost more bookkeeping. KV stored with another value is not reused.",
    )


MIN_SECRET_BYTES = 16
"""Fewest bytes of ``namespace.secret``: a shorter one can be found by trying all."""


def _strong(value: str) -> str:
    if (given := len(value.encode())) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"has {given} bytes; supported are {MIN_SECRET_BYTES} or more, drawn at random: "
            "openssl rand -hex 32"
        )
    return value


class NamespaceConfig(SchemaModel):
    """What separates KV that must not be shared."""

    secret: Annotated[str, AfterValidator(_strong)] | None = Field(
        default=None,
        description="Key mixed into every hash, so that block keys cannot be guessed from the "
        f"text: at least {MIN_SECRET_BYTES} random bytes (`openssl rand -hex 32`). All processes "
        "that share stored KV need the same one, a kvcore server too. Set it through the "
        "environment. kvcore masks it wherever it prints settings.",
        json_schema_extra={"secret": True},
        repr=False,
    )
    salt: Name | None = Field(
        default=None,
        description="Tenant for requests without a salt of their own. Tenants never share KV.",
    )
    weights_change: Literal["never", "on_reset", "any_time"] = Field(
        default="on_reset",
        description="When the weights of a running engine may be changed in place, which their "
        'files do not show. "on_reset": only when the engine is told to empty its cache. KV '
        "computed after such a reset is kept apart: only this engine finds it, and only until it "
        'ends. "any_time": KV is kept apart from the start. "never": a reset changes nothing. '
        "A change of weights that the engine reports to kvcore counts as a reset.",
    )


class PluginsConfig(SchemaModel):
    """Discovery of plugins."""

    disable: list[Name] = Field(
        default_factory=list, description="Names of entry points that are not loaded."
    )
    strict: bool = Field(
        default=False,
        description="Stop if a plugin cannot be loaded, instead of logging its name and "
        "continuing.",
    )


class OpsConfig(SchemaModel):
    """Device operations."""

    backend: Name = Field(
        default="auto",
        description="Implementation of the copies, and of the device operations of a blend "
        'outside the model: "auto" (the fastest that supports the memory), "native" (C, in '
        'host memory), "link" (the copy engines of a GPU), "reference" (torch), or the name of a '
        'plugin\'s, such as "triton". All but Triton blend with torch.',
    )


class Config(SchemaModel):
    """Every setting of kvcore. A value: equal settings compare equal, whatever their source."""

    engine: Name | None = Field(
        default=None,
        description='Engine that `kvcore serve` starts: "vllm" or the name of a plugin\'s.',
    )
    block: BlockConfig = BlockConfig()
    namespace: NamespaceConfig = NamespaceConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    tiers: dict[Annotated[str, AfterValidator(tier_name)], TierConfig] = Field(default_factory=dict)
    points: PointsConfig = PointsConfig()
    transfer: TransferConfig = TransferConfig()
    fusion: FusionConfig = FusionConfig()
    planner: PlannerConfig = PlannerConfig()
    plugins: PluginsConfig = PluginsConfig()
    ops: OpsConfig = OpsConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    events: EventsConfig = EventsConfig()
    cluster: ClusterConfig = ClusterConfig()
    explain: ExplainConfig = ExplainConfig()
    server: ServerConfig = ServerConfig()
    control: ControlConfig = ControlConfig()
    clients: ClientsConfig = ClientsConfig()
    tenants: dict[Annotated[str, AfterValidator(tenant_name)], TenantConfig] = Field(
        default_factory=dict
    )
    vllm: VllmConfig = VllmConfig()
    trtllm: TrtllmConfig = TrtllmConfig()
    sglang: SglangConfig = SglangConfig()

    _sources: dict[tuple[str, ...], Source] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # holds dicts of options

    def source(self, path: str | tuple[str, ...]) -> Source:
        """Return where the value at ``path`` ("host.capacity") came from."""
        keys = tuple(path.split(".")) if isinstance(path, str) else path
        return self._sources.get(keys, DEFAULT)
