"""Settings of operations by id or pattern, and pages of large results."""

from operations.tools.config import RetryPolicy, ToolConfig
from operations.tools.settings import ToolSettings, configure_tools

__all__ = ["RetryPolicy", "ToolConfig", "ToolSettings", "configure_tools"]
