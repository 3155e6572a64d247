"""Settings of operators: who the tenants are, what they may keep, and how kvcore is talked to."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from kvcore.config.fields import Name, SchemaModel, parse_size
from kvcore.errors import ConfigError

__all__ = ["ControlConfig", "TenantConfig", "parse_quota", "tenant_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


def tenant_name(value: str) -> str:
    """The name itself. Raises ConfigError for one that is no label."""
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"given the tenant name {value!r}; supported are up to 64 letters, digits, ., _ and -, "
            "starting with a letter or digit"
        )
    return value


def parse_quota(text: str, capacity: int) -> int:
    """Bytes of a quota: a size, or a share ("25%") of ``capacity`` bytes.

    Raises ConfigError for anything else.
    """
    share = _SHARE.fullmatch(text.strip())
    if share is None:
        return parse_size(text)
    percent = float(share[1])
    if percent > 100:
        raise ConfigError(f"given {text!r}; supported is a share of a tier up to 100%, or a size")
    return int(capacity * percent / 100)


def _quota(value: object) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ConfigError(f'given {value!r}; supported is a size ("8GiB") or a share ("25%")')
    parse_quota(str(value), 1)
    return str(value)


def _socket(value: str) -> str:
    if not re.fullmatch(r"ipc://.+", value):
        raise ConfigError(f'given {value!r}; supported is "ipc://SOCKET"')
    return value


class TenantConfig(SchemaModel):
    """A tenant: the requests with one salt, and how much of their KV is kept. One table
    `[tenants.NAME]` for each; NAME is what metrics, `kvcore ctl` and its audit log call it."""

    salt: str | None = Field(
        default=None,
        description="Salt of its requests (vLLM: `cache_salt`). Unset: NAME. Empty: requests "
        "without a salt. It is masked wherever kvcore prints its settings.",
        json_schema_extra={"secret": True},
        repr=False,
    )
    loras: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA weights that its requests use, by name, with the path or hub name that "
        "the engine was given: their KV counts too.",
    )
    quota: dict[Name, Annotated[str, BeforeValidator(_quota)]] = Field(
        default_factory=dict,
        description='Most it may have of a tier, by tier: a size ("8GiB") or a share of the tier '
        '("25%"). A tier that is not named: as much as anyone.',
    )


class ControlConfig(SchemaModel):
    """`kvcore ctl`: what operators do while kvcore runs, and the record of it."""

    address: Annotated[str, AfterValidator(_socket)] | None = Field(
        default=None,
        description='Socket ("ipc://SOCKET", mode 0600) at which an engine with tiers of its own '
        "answers `kvcore ctl`. A kvcore server answers at `server.address` and needs none. Unset: "
        "no socket.",
    )
    audit: Name | None = Field(
        default=None,
        description="File (mode 0600) to which every operation of `kvcore ctl` that changes "
        "something is appended, a line of JSON each. Unset: the log alone has them.",
    )
