"""Operations for agents: tools in the form of each model provider and framework, and a transcript of their use."""

from operations.agents.providers import Loss, provider_tools
from operations.agents.toolbox import Step, Toolbox, Transcript

__all__ = ["Loss", "Step", "Toolbox", "Transcript", "provider_tools"]
