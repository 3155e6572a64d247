"""Settings for operators: tenants, their quotas, and the control socket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvcore.config.fields import Name, SchemaModel, is_socket, parse_size
from kvcore.errors import ConfigError

__all__ = ["ClientsConfig", "ControlConfig", "TenantConfig", "parse_quota", "tenant_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


def tenant_name(value: str) -> str:
    """Return the name; ConfigError if it is not a valid label."""
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"given the tenant name {value!r}; supported are up to 64 letters, digits, ., _ and -, "
            "starting with a letter or digit"
        )
    return value


def parse_quota(text: str, capacity: int) -> int:
    """Return the bytes of a quota: a size, or a share ("25%") of ``capacity`` bytes.

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
    if not is_socket(value):
        raise ConfigError(f'given {value!r}; supported is "ipc://SOCKET" with the path of a socket')
    return value


Quotas = dict[Name, Annotated[str, BeforeValidator(_quota)]]
Report = Literal["off", "tokens", "explain"]


class ClientsConfig(SchemaModel):
    """What the clients of an engine may learn and ask for. A tenant's own table overrides it."""

    report: Report | None = Field(
        default=None,
        description="What a response may report if its request asks: nothing, the reused tokens by "
        "tier, or also what `kvcore explain` knows of the request itself, without causes and rates "
        "that depend on others. Clients that share a salt can learn which texts the others sent. "
        'Unset: "explain", but "off" for requests without a salt once a tenant is named, because '
        "any client may send these.",
    )
    promises: bool = Field(
        default=True,
        description="Give promises of KV to requests that ask for one, and wait for KV that was "
        "promised to a request (prefill here, decode there). A promise contains a block's key and "
        "the address of this node.",
    )
    unnamed_quota: Quotas = Field(
        default_factory=dict,
        description="Largest share of each tier that all requests of no named tenant may use "
        "together, as for `tenants.NAME.quota`: whatever salts and LoRAs they have.",
    )


class TenantConfig(SchemaModel):
    """A tenant: the requests with one salt, and how much of their KV is kept.

    One table `[tenants.NAME]` each. NAME appears in metrics, in `kvcore ctl` and in its audit log.
    """

    salt: str = Field(
        description="Salt of the tenant's requests (vLLM: `cache_salt`). Empty: requests without "
        "a salt. Who knows it can read how much of a text the tenant has cached, so draw it at "
        "random. kvcore masks it wherever it prints settings.",
        json_schema_extra={"secret": True},
        repr=False,
    )
    loras: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA weights that the tenant's requests use: names, with the path or hub "
        "name given to the engine. Their KV counts towards the quota.",
    )
    quota: Quotas = Field(
        default_factory=dict,
        description='Largest share of each tier that the tenant may use: a size ("8GiB") or a '
        'percentage of the tier ("25%"). A tier that is not listed has no limit for the tenant.',
    )
    report: Report | None = Field(
        default=None,
        description="As `clients.report`, for this tenant. Unset: the same.",
    )
    promises: bool | None = Field(
        default=None, description="As `clients.promises`, for this tenant. Unset: the same."
    )

    @model_validator(mode="before")
    @classmethod
    def _salted(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("salt") is None:
            raise ConfigError(
                "has no salt; give the salt of its requests, drawn at random (openssl rand -hex "
                '16), or "" for requests without a salt'
            )
        return given


class ControlConfig(SchemaModel):
    """`kvcore ctl`: control of a running kvcore, and its audit log."""

    address: Annotated[str, AfterValidator(_socket)] | None = Field(
        default=None,
        description='Socket ("ipc://SOCKET", mode 0600) at which an engine with tiers of its own '
        "answers `kvcore ctl`. A kvcore server answers at `server.address` and does not need it. "
        "Unset: no socket.",
    )
    audit: Name | None = Field(
        default=None,
        description="File (mode 0600) to which every operation of `kvcore ctl` that changes "
        "something, or would, is appended as lines of JSON: before it is carried out, and after. "
        "What cannot be written is not carried out. Unset: only the log records them.",
    )
