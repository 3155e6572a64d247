"""Settings that every store has, and how a plugin's ``options`` become them."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from kvcore.config.fields import SchemaModel, Seconds
from kvcore.config.walk import supported
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.tiers.spec import TierContext


class StoreOptions(SchemaModel):
    """What ``[tiers.NAME.options]`` of every store takes."""

    known_by: ClassVar[tuple[str, ...] | None] = None
    """Options that tell one store from another; the others say how it is used. None: all that its
    kind adds to these."""

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")] = Field(
        default="kvcore", description="First part of every name: keeps deployments apart."
    )
    timeout_s: Seconds = Field(
        default=2.0, description="Seconds after which one request to the store has failed."
    )
    deadline_s: Seconds = Field(
        default=8.0, description="Seconds after which what failed is not tried again."
    )
    retries: int = Field(
        default=2, ge=0, le=10, description="Times a request that found no store is repeated."
    )
    parallel: int = Field(
        default=4, ge=1, le=64, description="Requests at once, for each operation of a rank."
    )
    lookup_s: Seconds = Field(
        default=0.5,
        description="Longest time, in seconds, that a prompt waits to hear what the store holds.",
    )
    absent_s: Seconds = Field(
        default=2.0,
        description="Seconds for which a block that was not there is not asked for again.",
    )
    splits_s: Seconds = Field(
        default=5.0,
        description="Seconds after which it is asked again at which numbers of ranks and stages "
        "others write. It is asked when a block is not there.",
    )

    @property
    def place(self) -> str:
        """Which store it is, and where in it: what is written down about it is of no other."""
        known = self.known_by
        if known is None:
            known = tuple(type(self).model_fields.keys() - StoreOptions.model_fields.keys())
        told = self.model_dump(mode="json", include={*known, "prefix"})
        return json.dumps(told, sort_keys=True)


Options = TypeVar("Options", bound=StoreOptions)


def read_options(kind: type[Options], context: TierContext) -> Options:
    """The options of a tier. Raises ConfigError naming each that is unknown or does not fit."""
    try:
        return kind.model_validate(dict(context.options))
    except ValidationError as error:
        lines = [_explain(kind, item) for item in error.errors()]
        raise ConfigError(f"[tiers.{context.name}.options]: {'; '.join(lines)}") from error


def _explain(kind: type[StoreOptions], item: Any) -> str:
    name = str(item["loc"][0]) if item["loc"] else ""
    known = kind.model_fields
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{name or item['msg']}: there is no such option; {advice}"
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{name}: {cause}"
    if item["type"] == "missing":
        return f"{name}: is missing; supported is {supported(known[name])}"
    return f"{name}: given {item['input']!r}; supported is {supported(known[name])}"
