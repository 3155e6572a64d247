"""Every error that kvcore raises on purpose.

    KVCoreError
    ├── ConfigError          a setting is unknown, of the wrong type, or out of range
    ├── PluginError          a plugin could not be loaded, or its hooks do not fit
    ├── UnsupportedError     kvcore does not support this engine, version, model or layout
    ├── LayoutError          strides, shapes or dtypes do not describe the memory that was given
    ├── CapacityError        a request exceeds a limit, such as the capacity of a tier
    ├── TierError            a tier could not read or write
    │   ├── TierUnavailable  the medium is missing, read-only, full or down
    │   ├── BlockMissing     the medium no longer holds the block
    │   └── CorruptBlock     the bytes read are not the bytes written
    ├── ClusterError         the directory of a cluster cannot be reached
    ├── FormatError          a file or message has another version, model or shape
    └── TransferError        a transfer graph failed
        ├── StepBroken       KV that a step counts on is not there: the engine must not use it
        └── EngineMustEnd    going on could serve wrong tokens: the engine's process must end
            ├── RankLostError    ranks of an engine are out of step
            └── PagesInUse       copies may still use pages that the engine takes back

A message says what was given, what is supported, and what to change. Passwords in URLs are masked.
"""

from __future__ import annotations

from enum import Enum

from kvcore.masking import mask_passwords


class KVCoreError(Exception):
    """Base class of every error that kvcore raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(mask_passwords(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(KVCoreError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class PluginError(KVCoreError):
    """A plugin could not be loaded, or its hooks do not fit their specification."""


class UnsupportedError(KVCoreError):
    """kvcore does not support this engine, version, model or layout."""


class LayoutError(KVCoreError, ValueError):
    """Strides, shapes or dtypes do not describe the memory that was given."""


class CapacityError(KVCoreError):
    """A request exceeds a limit, such as the capacity of a tier."""


class TierError(KVCoreError):
    """A tier could not read or write."""


class TierUnavailable(TierError):
    """The medium behind a tier is missing, read-only, full or down."""


class BlockMissing(TierError):
    """The medium no longer holds the block: a shared store may evict it at any time."""


class Mismatch(str, Enum):
    """How a stored block differs from the one that was asked for. The values are metric labels."""

    CORRUPT = "corrupt"
    """Its checksum does not fit, or its header is damaged."""
    FORGED = "forged"
    """Its MAC or its tag does not fit, or it is not protected as blocks are here."""
    OTHER = "other"
    """It is another block: its key, parent, namespace or shard is not the expected one."""
    TRUNCATED = "truncated"
    """It is shorter or longer than a block."""


class CorruptBlock(TierError):
    """The bytes read are not the bytes that were written; ``mismatch`` says in which way."""

    def __init__(self, message: str = "", mismatch: Mismatch = Mismatch.CORRUPT) -> None:
        super().__init__(message)
        self.mismatch = mismatch


class ClusterError(KVCoreError):
    """The directory of a cluster cannot be reached, or does not carry out a request."""


class FormatError(KVCoreError, ValueError):
    """A file or message has another version, model or shape than expected."""


class TransferError(KVCoreError):
    """A transfer graph failed."""


class StepBroken(TransferError):
    """KV that an engine's step counts on is not there, so its results must not be used."""


class EngineMustEnd(TransferError):
    """If the engine went on, it could hang or serve wrong tokens, so no guard swallows this."""


class PagesInUse(EngineMustEnd):
    """Copies may still read or write pages of KV that the engine gives to others, or unmaps."""


class RankLostError(EngineMustEnd):
    """A rank stopped where other ranks wait for it in a collective.

    Whatever it did next would meet the others in the wrong collective: they would hang, or take
    its numbers for theirs. So no guard may swallow this error. It must end the engine's process.
    """
