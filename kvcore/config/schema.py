"""The settings schema: one frozen pydantic model per table, one documented field per key.

The models are strict (no ``"4"`` for an integer) and refuse unknown keys. Every field has a
default, so ``Config()`` is valid. ``kvcore.config.load`` builds a ``Config`` from files, the
environment and an engine's JSON. The reference page is generated from this module.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from kvcore.config.fields import (
    DEFAULT,
    FolderPath,
    Name,
    Options,
    SchemaModel,
    Seconds,
    Size,
    Source,
    expand_user,
    format_size,
    parse_size,
)
from kvcore.config.schema_cluster import ClusterConfig, EventsConfig
from kvcore.config.schema_control import ControlConfig, TenantConfig, tenant_name
from kvcore.errors import ConfigError

__all__ = [
    "BlockConfig",
    "ClusterConfig",
    "Config",
    "ControlConfig",
    "DiskConfig",
    "EventsConfig",
    "ExplainConfig",
    "FusionConfig",
    "HostConfig",
    "LogConfig",
    "MetricsConfig",
    "NamespaceConfig",
    "OpsConfig",
    "PlannerConfig",
    "PluginsConfig",
    "SchemaModel",
    "ServerConfig",
    "SglangConfig",
    "Size",
    "Source",
    "TenantConfig",
    "TierConfig",
    "TransferConfig",
    "TrtllmConfig",
    "VllmConfig",
    "expand_user",
    "format_size",
    "parse_size",
]

RESERVED_TIERS = ("device", "host", "disk")
"""Names that a ``[tiers.NAME]`` table cannot have, because they are kvcore's own tiers."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ConfigError(f"given {value}; supported is a power of two")
    return value


def _tier_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", value) or value in RESERVED_TIERS:
        raise ConfigError(
            f"given the tier name {value!r}; supported are lower-case letters, digits, _ and -, "
            f"starting with a letter, and not {', '.join(RESERVED_TIERS)}"
        )
    return value


class BlockConfig(SchemaModel):
    """The unit of identity, placement and eviction."""

    tokens: Annotated[int, Field(ge=8, le=1024), AfterValidator(_power_of_two)] = Field(
        default=16,
        description="Tokens per token block, a power of two. Smaller blocks reuse more of a "
        "shared prefix but cost more bookkeeping. KV stored with another value is not reused.",
    )


class NamespaceConfig(SchemaModel):
    """What separates KV that must not be shared."""

    secret: Name | None = Field(
        default=None,
        description="Key mixed into every hash, so that block keys cannot be guessed from the "
        "text. All processes that share stored KV need the same one. Set it through the "
        "environment. kvcore masks it wherever it prints settings.",
        json_schema_extra={"secret": True},
        repr=False,
    )
    salt: Name | None = Field(
        default=None,
        description="Tenant for requests without a salt of their own. Tenants never share KV.",
    )


class HostConfig(SchemaModel):
    """The host-memory tier."""

    capacity: Size = Field(
        default=parse_size("4GiB"),
        gt=0,
        description="Bytes of host memory for KV, in total over all ranks of this engine.",
    )
    arrangement: Literal["blockwise", "layerwise"] = Field(
        default="blockwise",
        description="Order of bytes in the arena: all layers of a block together (fewest and "
        "largest disk requests), or all blocks of a layer together.",
    )
    policy: Name = Field(
        default="lru", description="Eviction policy: any registered one (see `kvcore plugins`)."
    )
    policy_options: Options = Field(default_factory=dict, description="Arguments of the policy.")
    huge_pages: bool = Field(
        default=True, description="Request 2 MiB pages where the system allows them."
    )
    pin: bool = Field(
        default=True,
        description="Lock the arena in memory for DMA by the GPU, if there is one. If the limit "
        "on locked memory forbids it, kvcore logs a warning and continues.",
    )
    prefault: Size = Field(
        default=parse_size("512MiB"),
        ge=0,
        description="Bytes of each rank's arena to pre-fault ahead of use, in the background, so "
        "that loads do not wait for page faults. With as much as `capacity`, the whole arena is "
        "pre-faulted at the start. With 0, the first use of memory is slower.",
    )


class BackingConfig(SchemaModel):
    """Settings that every tier below host memory has."""

    capacity: Size = Field(
        default=parse_size("32GiB"),
        gt=0,
        description="Bytes that the tier may hold, in total over all ranks; for a folder on disk, "
        "over all models in it. A remote store has a limit of its own: there, this limits how "
        "many of its blocks the engine keeps track of.",
    )
    policy: Name = Field(default="lru", description="Eviction policy: any registered one.")
    policy_options: Options = Field(default_factory=dict, description="Arguments of the policy.")
    write: Literal["write_through", "write_back", "selective"] = Field(
        default="write_through",
        description="When a block is written to the tier: when it is saved, when host memory "
        "evicts it, or at its `admit_after`-th use. Blocks that only host memory holds are lost "
        "when the engine ends.",
    )
    admit_after: int = Field(
        default=2,
        ge=1,
        le=255,
        description="Uses before a block is written, for `write = selective`.",
    )


class DiskConfig(BackingConfig):
    """The disk tier. Off unless `path` is set."""

    path: FolderPath | None = Field(
        default=None,
        description="Folder of the disk tier on a local disk, created if missing. `~` is "
        "expanded. Unset: no disk tier.",
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Bypass the page cache (O_DIRECT): where the file system supports it, always "
        "(refuse to start otherwise), or never.",
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Threads per rank for reads and writes if the kernel's asynchronous I/O is "
        "not available, and for decryption.",
    )
    sync_interval_s: Seconds = Field(
        default=5.0,
        description="Seconds between flushes to the medium. A crash of the machine loses at most "
        "the writes of this interval. A crash of the engine loses nothing.",
    )
    key_env: Name | None = Field(
        default=None,
        description="Encrypt blocks on disk (AES-256-GCM) with the key in this environment "
        "variable: 32 bytes as 64 hex digits or Base64. Every worker needs it. KV written with "
        "another key, or without one, is not used. Needs the package cryptography.",
    )
    key_file: Name | None = Field(
        default=None,
        description="Encrypt blocks on disk with the key in this file, as for `key_env`.",
    )
    to_device: Literal["off", "on"] = Field(
        default="off",
        description="Read blocks from disk straight into device memory (GPUDirect Storage, "
        "through NIXL). The blocks bypass host memory and are not cached there. Not supported "
        "with encryption or with a `kvcore server`. Only the vLLM adapter uses it: the others "
        "bring blocks to host memory before they know the pages.",
    )
    device_staging: Size = Field(
        default=parse_size("64MiB"),
        gt=0,
        description="Bytes of device memory per rank that `to_device` reads into.",
    )

    @property
    def encrypted(self) -> bool:
        """True if blocks are encrypted on disk."""
        return self.key_env is not None or self.key_file is not None


class TierConfig(BackingConfig):
    """A backing tier from a plugin: one table `[tiers.NAME]` each, read in order of name."""

    plugin: Name = Field(
        description="Name of the tier plugin (see `kvcore plugins`).",
    )
    options: Options = Field(default_factory=dict, description="Arguments of the plugin.")


class TransferConfig(SchemaModel):
    """How bytes are moved."""

    copy_threads: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Threads per rank that copy between device pages and host memory.",
    )
    batch_blocks: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Token blocks moved by one operation of a transfer graph.",
    )
    queue_depth: int = Field(
        default=16384,
        ge=1,
        le=65536,
        description="Operations in flight per rank. A save that does not fit is skipped and "
        "counted; a load that does not fit is recomputed.",
    )
    load_deadline_s: Seconds = Field(
        default=30.0,
        description="Seconds after which a load is abandoned and its tokens are recomputed.",
    )
    sync_load_max: Size = Field(
        default=parse_size("512MiB"),
        description="Largest load, in bytes over all ranks, that runs inside the engine's step, "
        "layer by layer. A larger load, or one from disk, finishes before the request is "
        "scheduled.",
    )


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class FusionConfig(SchemaModel):
    """Selective recomputation: reuse of cached text that is not a prefix. Off by default."""

    enabled: bool = Field(
        default=False,
        description="Reuse stored chunks at other positions and recompute the few tokens that "
        "matter most. Answers are then close to the engine's own, but not equal to them.",
    )
    ratio: Share = Field(
        default=0.15,
        description="Share of the reused tokens to recompute: 0 recomputes none of them, 1 "
        "recomputes everything. A request may ask for another share.",
    )
    adaptive: bool = Field(
        default=True,
        description="Decide for each request, from measured rates: blend only if that is clearly "
        "faster than computing what follows the prefix, and recompute as much as loading hides, "
        "from `ratio` to `ratio_max`. A request that asks for a ratio gets it.",
    )
    ratio_max: Share = Field(
        default=0.5,
        description="Largest share to recompute while it costs no time; see `adaptive`.",
    )
    spread: Share = Field(
        default=0.5,
        description="The share falls over the layers from `ratio * (1 + spread)` to `ratio * (1 - "
        "spread)`.",
    )
    gate: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Quality gate: the largest error of recomputed rows that is accepted after a "
        "quarter of the layers (squared distance of V relative to its square, times the share of "
        "rows not recomputed). Above it, the request recomputes a larger share or is computed in "
        "full. Unset: no gate.",
    )
    selector: Name = Field(
        default="runs",
        description="Algorithm that chooses the tokens to recompute: any registered one "
        "(see `kvcore plugins`).",
    )
    selector_options: Options = Field(
        default_factory=dict, description="Arguments of the selector."
    )
    min_tokens: int = Field(
        default=64,
        ge=16,
        description="Fewest tokens of a stored chunk that are reused at another position, and "
        "fewest tokens of all chunks together for a blend.",
    )
    unmarked: bool = Field(
        default=True,
        description="Look for stored chunks anywhere in a prompt. Otherwise only chunks that the "
        "request marks, or that the separator delimits, are reused.",
    )
    separator: list[int] = Field(
        default_factory=list,
        description="Token ids that separate chunks, for prompts that mark their chunks this way.",
    )
    behind: list[int] = Field(
        default_factory=list,
        description="Token ids that precede chunks when they are warmed, such as a begin-of-text "
        "token or a system prompt. Marked chunks are looked up after them.",
    )
    staging_max: Size = Field(
        default=parse_size("1GiB"),
        description="Largest memory, in bytes over all ranks, for the chunks that one step loads "
        "into prompts, besides the engine's own. If the chunks of a prompt need more, only those "
        "that fit are reused.",
    )


class PlannerConfig(SchemaModel):
    """Choice between loading the cached part of a prompt and recomputing it."""

    enabled: bool = Field(
        default=False,
        description="Load only what is expected to arrive before the engine would have computed "
        "it, from measured rates of loads and of prefill. Abandon a load when waiting for it "
        "costs more than computing. Until both rates are measured, everything cached is loaded. "
        "The rates come from the metrics, so `metrics.enabled` must be on.",
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
        'outside the model: "auto" (the fastest that supports the memory), "native" (C; blends '
        'use torch), "reference" (torch), or the name of a plugin\'s, such as "triton".',
    )


class MetricsConfig(SchemaModel):
    """Counters and timings."""

    enabled: bool = Field(default=True, description="Collect metrics and pass them to the engine.")


class TraceConfig(SchemaModel):
    """Timelines of transfers and blends."""

    path: FolderPath | None = Field(
        default=None,
        description="Folder for one trace file per worker, for Perfetto or Chrome. The trace "
        "shows which bytes moved while which layers computed. Unset: no trace.",
    )


class ExplainConfig(SchemaModel):
    """Records of requests: what matched, what was planned and why, and the alternatives."""

    path: FolderPath | None = Field(
        default=None,
        description="Folder for records of the requests that ended last, for `kvcore explain`. "
        "The records are for operators, because they reveal that text was seen under another "
        "salt. Unset: no records.",
    )
    capacity: Size = Field(
        default=parse_size("16MiB"),
        ge=1 << 16,
        description="Bytes of all records in the folder.",
    )
    spans: bool = Field(
        default=False,
        description="Make an OpenTelemetry span for each request, with the tracer provider of the "
        "engine's process. Needs the package opentelemetry-api.",
    )


def _address(value: str) -> str:
    if value == "local" or re.fullmatch(r"ipc://.+|tcp://[^/]+:[0-9]+", value):
        return value
    raise ConfigError(
        f'given {value!r}; supported are "local", "ipc://SOCKET" and "tcp://HOST:PORT"'
    )


def _listener(value: str) -> str:
    port = re.fullmatch(r".+:([0-9]{1,5})", value)
    if port is None or int(port[1]) > 65535:
        raise ConfigError(f'given {value!r}; supported is "HOST:PORT"')
    return value


class ServerConfig(SchemaModel):
    """`kvcore server`: one process that caches KV for every engine of the machine.

    The server and its clients read the same table.
    """

    address: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        description='Where the server listens and engines connect: "local" (a socket in '
        '`folder`), "ipc://SOCKET", or "tcp://HOST:PORT" (with `keys`). If set, the engine has no '
        "tiers of its own. Unset: the engine uses no server.",
    )
    folder: FolderPath | None = Field(
        default=None,
        description="Folder in memory (tmpfs) that holds the host tier and is accessible only to "
        "its owner. Every client needs it. Unset: `/dev/shm/kvcore-UID`.",
    )
    keys: FolderPath | None = Field(
        default=None,
        description="Folder of CURVE keys, made by `kvcore server --keygen FOLDER`. TCP requires "
        "it.",
    )
    models: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Models served side by side. Each gets an equal share of `host.capacity`. "
        "Engines with the same model share its KV.",
    )
    deadline_s: Seconds = Field(
        default=0.1,
        description="Longest time, in seconds, that an engine waits for an answer. After that the "
        "engine recomputes, and does not use the server until the server has answered a heartbeat.",
    )
    lease_s: Seconds = Field(
        default=5.0,
        description="Seconds of silence after which server and client consider each other gone. A "
        "client whose process is alive keeps the memory that its copies use.",
    )
    metrics: Annotated[str, AfterValidator(_listener)] | None = Field(
        default=None,
        description='Address at which the server exposes its metrics to Prometheus: "HOST:PORT". '
        "There is no authentication, so bind an address that only scrapers can reach. Unset: not "
        "exposed.",
    )


class LogConfig(SchemaModel):
    """kvcore's own log lines."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Least severe level to write. Level debug has one line per decision.",
    )
    format: Literal["text", "json"] = Field(
        default="text",
        description="Write lines as `event key=value ...`, or as one JSON object each.",
    )


class AdapterConfig(SchemaModel):
    """Settings that every engine's adapter has.

    An adapter describes the settings that depend on its engine.
    """

    min_load_tokens: int
    save_decode: bool = Field(
        default=True,
        description="Save generated tokens too, so that the next turn of a conversation finds its "
        "answer.",
    )
    layerwise: bool


def _min_load_tokens(engine: str) -> Any:
    """Return the field of that name for ``engine``."""
    return Field(
        default=64,
        ge=0,
        description=f"Fewest tokens to load beyond what {engine} holds in its own cache. Fewer "
        "tokens are recomputed.",
    )


class VllmConfig(AdapterConfig):
    """The vLLM adapter."""

    min_load_tokens: int = _min_load_tokens("vLLM")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer during the forward pass. Waiting inside the forward pass "
        "needs piecewise CUDA graphs: on a GPU with full graphs kvcore waits before the forward "
        "pass instead, unless this is set to true in `kv_connector_extra_config`.",
    )
    promise_s: Seconds = Field(
        default=5.0,
        description="Longest time, in seconds, that a request waits for KV that a prefill "
        "instance has announced. What has not arrived by then is computed.",
    )


class TrtllmConfig(AdapterConfig):
    """The TensorRT-LLM adapter."""

    min_load_tokens: int = _min_load_tokens("TensorRT-LLM")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer during the forward pass. With CUDA graphs or "
        "torch.compile the engine may skip the hooks that wait for a layer: kvcore then waits "
        "before the forward pass, whatever this setting is.",
    )
    stage_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1,
        description="Longest time, in seconds, that a lookup waits for KV that is not in host "
        "memory. It waits up to this long for remote stores to say what they have. With one rank "
        "it then waits up to this long again while blocks are read from disk or a store into host "
        "memory; with tensor parallelism it does not wait for reads. TensorRT-LLM cannot retract "
        "a cache hit, so only blocks in host memory are reported as a hit. Blocks that arrive "
        "later serve later requests.",
    )


class SglangConfig(SchemaModel):
    """The SGLang adapter."""

    min_load_tokens: int = _min_load_tokens("SGLang")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer during the forward pass. Otherwise a batch waits for its "
        "loads before its forward pass.",
    )
    prefetch: Literal["best_effort", "timeout", "wait"] = Field(
        default="timeout",
        description="How long a request waits in SGLang's queue while its blocks are read from "
        "disk or a remote store into host memory: not at all, at most `prefetch_timeout_s` in "
        "total, or until they have arrived (at most `transfer.load_deadline_s`). Other requests "
        "may overtake it.",
    )
    prefetch_timeout_s: Seconds = Field(
        default=0.5, description='Seconds, for `prefetch = "timeout"`.'
    )
    keep_on_flush: bool = Field(
        default=False,
        description="Let SGLang's `/flush_cache` empty only SGLang's own cache. Otherwise it also "
        "removes every block from every tier of kvcore, which is needed after weights were "
        "changed in place.",
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
    tiers: dict[Annotated[str, AfterValidator(_tier_name)], TierConfig] = Field(
        default_factory=dict
    )
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
