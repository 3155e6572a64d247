"""Settings: their schema, where they come from, and how sources are merged.

This package is the only place that reads the environment.
"""

from __future__ import annotations

__all__ = [
    "FORWARDED_VARIABLE",
    "SECRETS_VARIABLE",
    "AdapterConfig",
    "BackingConfig",
    "Config",
    "NamespaceConfig",
    "SchemaModel",
    "Setting",
    "Source",
    "engine_environment",
    "explicit_settings",
    "format_size",
    "forwarded_config",
    "load_config",
    "merge_tables",
    "missing_secrets",
    "names_settings",
    "parse_assignment",
    "parse_size",
    "read_key",
    "secret_settings",
    "secrets_in",
    "settings",
]

from kvcore.config.fields import SchemaModel, Source, format_size, parse_size
from kvcore.config.load import (
    FORWARDED_VARIABLE,
    SECRETS_VARIABLE,
    Setting,
    engine_environment,
    explicit_settings,
    forwarded_config,
    load_config,
    merge_tables,
    missing_secrets,
    names_settings,
    parse_assignment,
    read_key,
    secret_settings,
    secrets_in,
    settings,
)
from kvcore.config.schema import Config, NamespaceConfig
from kvcore.config.schema_engines import AdapterConfig
from kvcore.config.schema_tiers import BackingConfig
