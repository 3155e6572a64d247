"""The settings tables ``[host]``, ``[disk]``, ``[tiers.NAME]``, ``[points]``, ``[transfer]``."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from kvcore.config.fields import FolderPath, Name, Options, SchemaModel, Seconds, Size, parse_size
from kvcore.errors import ConfigError

__all__ = [
    "RESERVED_TIERS",
    "BackingConfig",
    "DiskConfig",
    "HostConfig",
    "PointsConfig",
    "TierConfig",
    "TransferConfig",
    "tier_name",
]

RESERVED_TIERS = ("device", "host", "disk")
"""Names that a ``[tiers.NAME]`` table cannot have, because they are kvcore's own tiers."""


def tier_name(value: str) -> str:
    """Return ``value`` if it is valid as NAME in ``[tiers.NAME]``. Raises ConfigError."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", value) or value in RESERVED_TIERS:
        raise ConfigError(
            f"given the tier name {value!r}; supported are lower-case letters, digits, _ and -, "
            f"starting with a letter, and not {', '.join(RESERVED_TIERS)}"
        )
    return value


POLICY = (
    'Eviction policy: "lfu" (least often used lately), "lru", "arc", "s3fifo", "priority", or the '
    "name of a plugin's (see `kvcore plugins`)."
)
POLICY_OPTIONS = 'Arguments of the policy. That of "lfu": `max_uses` (4: more uses count no more).'


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
    policy: Name = Field(default="lfu", description=POLICY)
    policy_options: Options = Field(default_factory=dict, description=POLICY_OPTIONS)
    huge_pages: bool = Field(
        default=True, description="Request 2 MiB pages where the system allows them."
    )
    pin: bool = Field(
        default=True,
        description="Lock the arena in memory for DMA by the GPU, if there is one. If its "
        "driver refuses, kvcore logs a warning and continues.",
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
    policy: Name = Field(default="lfu", description=POLICY)
    policy_options: Options = Field(default_factory=dict, description=POLICY_OPTIONS)
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
        "another key, or without one, is not used.",
    )
    key_file: Name | None = Field(
        default=None,
        description="Encrypt blocks on disk with the key in this file, as for `key_env`.",
    )
    authenticate: bool = Field(
        default=True,
        description="With `namespace.secret`, give each block on disk a MAC, so that KV which "
        "somebody else wrote into the folder is never used. Off: a checksum only, which detects "
        "damage and not forgery. Encrypted blocks are always authenticated.",
    )
    to_device: Literal["off", "on"] = Field(
        default="off",
        description="Read blocks from disk straight into device memory (GPUDirect Storage, "
        "through NIXL). The blocks bypass host memory and are not cached there. Not supported "
        "with encryption, with a `kvcore server`, or with both `namespace.secret` and "
        "`authenticate`, because the device verifies sums only. Only the vLLM adapter uses it: the "
        "others "
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


class PointsConfig(SchemaModel):
    """Resume points of models with states or windows: where what is found can end."""

    policy: Name = Field(
        default="spaced",
        description='Which of the points that the engine offers are saved: "spaced" (the ends of '
        "prompts, junctions of prompts, and between them as many as take an eighth of the bytes of "
        'the blocks), "all", or the name of a plugin\'s (see `kvcore plugins`).',
    )
    policy_options: Options = Field(
        default_factory=dict,
        description='Arguments of the policy. Those of "spaced": `ends` and `junctions` '
        "(true), `share` (8: bytes of blocks for each byte of a point between them), and `every` "
        "(tokens between two of these, in place of `share`; 0: none).",
    )


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
        description="Seconds after which a load is abandoned and its tokens are recomputed. It "
        "bounds all that a request waits for in kvcore, together: answers of stores, free slots, "
        "its own loads and those of other requests that bring what it wants, and on vLLM the files "
        "of its LoRA adapter. Then only what host memory has is loaded, in a tenth of this time at "
        "most. Waiting for KV that a prefill instance has promised does not count.",
    )
    sync_load_max: Size = Field(
        default=parse_size("512MiB"),
        description="Largest load, in bytes over all ranks, that runs inside the engine's step, "
        "layer by layer. A larger load, or one from disk, finishes before the request is "
        "scheduled. On vLLM, loads run inside a step only without asynchronous scheduling, "
        "pipeline stages and Model Runner V2: otherwise vLLM does not recover from one that "
        "fails.",
    )
