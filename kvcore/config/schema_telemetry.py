"""The settings tables ``[metrics]``, ``[trace]``, ``[explain]`` and ``[log]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcore.config.fields import FolderPath, SchemaModel, Size, parse_size

__all__ = ["ExplainConfig", "LogConfig", "MetricsConfig", "TraceConfig"]


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
