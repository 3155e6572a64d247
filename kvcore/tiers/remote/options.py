"""The settings that every store has, and their validation."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from kvcore.config.fields import Name, SchemaModel, Seconds
from kvcore.config.walk import is_secret, supported
from kvcore.errors import ConfigError
from kvcore.masking import MASK

if TYPE_CHECKING:
    from kvcore.tiers.spec import TierContext


class StoreOptions(SchemaModel):
    """The settings that ``[tiers.NAME.options]`` of every store accepts."""

    known_by: ClassVar[tuple[str, ...] | None] = None
    """Names of the options that identify the store; the other options only say how it is used.

    None stands for all options that the subclass adds.
    """

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")] = Field(
        default="kvcore", description="First part of every name. Keeps deployments apart."
    )
    timeout_s: Seconds = Field(
        default=2.0, description="Seconds after which a request to the store has failed."
    )
    deadline_s: Seconds = Field(
        default=8.0, description="Seconds after which a failed request is not repeated any more."
    )
    retries: int = Field(
        default=2,
        ge=0,
        le=10,
        description="How often a request that did not reach the store is repeated.",
    )
    parallel: int = Field(
        default=4, ge=1, le=64, description="Parallel requests for each operation of a rank."
    )
    lookup_s: Seconds = Field(
        default=0.5,
        description="Longest time, in seconds, that a prompt waits for a lookup in the store.",
    )
    absent_s: Seconds = Field(
        default=2.0,
        description="Seconds for which a block that was missing is not looked up again.",
    )
    splits_s: Seconds = Field(
        default=5.0,
        description="Seconds between two reads of the splits that other engines have stored: their "
        "numbers of ranks and stages. They are read when a block is missing.",
    )

    key_env: Name | None = Field(
        default=None,
        description="Encrypt values (AES-256-GCM) with the key in this environment variable, as "
        "for `disk.key_env`. Every host that uses the store needs it.",
    )
    key_file: Name | None = Field(
        default=None,
        description="Encrypt values with the key in this file, as for `disk.key_file`.",
    )

    @property
    def place(self) -> str:
        """A text that identifies the store and the place in it, for records kept about it."""
        known = self.known_by
        if known is None:
            known = tuple(type(self).model_fields.keys() - StoreOptions.model_fields.keys())
        identity = self.model_dump(mode="json", include={*known, "prefix"})
        return json.dumps(identity, sort_keys=True)


Options = TypeVar("Options", bound=StoreOptions)


def read_options(kind: type[Options], context: TierContext) -> Options:
    """Return the options of a tier. Raises ConfigError that names each unknown or invalid one."""
    try:
        return kind.model_validate(dict(context.options))
    except ValidationError as error:
        lines = [_explain(kind, item) for item in error.errors()]
        # Pydantic's own text shows what was given, so it is not the cause.
        raise ConfigError(f"[tiers.{context.name}.options]: {'; '.join(lines)}") from None


def _explain(kind: type[StoreOptions], item: Any) -> str:
    cause = item.get("ctx", {}).get("error")
    if not item["loc"] and isinstance(cause, ConfigError):  # of several options together
        return str(cause)
    name = str(item["loc"][0]) if item["loc"] else ""
    known = kind.model_fields
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        advice = f"did you mean {close[0]}?" if close else f"supported are {', '.join(known)}"
        return f"{name or item['msg']}: there is no such option; {advice}"
    if isinstance(cause, ConfigError):
        return f"{name}: {cause}"
    if item["type"] == "missing":
        return f"{name}: is missing; supported is {supported(known[name])}"
    secret = is_secret(("tiers", "NAME", "options", *map(str, item["loc"])))
    given = MASK if secret else repr(item["input"])
    return f"{name}: given {given}; supported is {supported(known[name])}"
