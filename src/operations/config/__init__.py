"""`operations.toml`: what it can say, and how it is read."""

from operations._derive import Secret
from operations.config.faults import ConfigError, ConfigFault
from operations.config.model import Config
from operations.config.reading import (
    ConfigFile,
    enforce_trusted,
    find_config,
    load_config,
    parse_config,
)
from operations.config.schema import config_schema

__all__ = [
    "Config",
    "ConfigError",
    "ConfigFault",
    "ConfigFile",
    "Secret",
    "config_schema",
    "enforce_trusted",
    "find_config",
    "load_config",
    "parse_config",
]
