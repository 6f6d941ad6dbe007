"""`operations.toml`: its model, and reading it."""

from operations._derive import Secret
from operations.config.checks import ConfigError, ConfigFault
from operations.config.model import Config, config_schema
from operations.config.reading import (
    ConfigFile,
    enforce_trusted,
    find_config,
    load_config,
    parse_config,
)

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
