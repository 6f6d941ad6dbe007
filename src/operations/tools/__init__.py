"""Settings of operations by id or pattern, and pages of large results."""

from operations.tools.config import RetryPolicy, ToolConfig
from operations.tools.settings import configure_tools

__all__ = ["RetryPolicy", "ToolConfig", "configure_tools"]
