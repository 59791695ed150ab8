"""OpenGyre: elastic reinforcement learning for agents whose executions last hours."""

__version__ = "0.1.0"
