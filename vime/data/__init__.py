"""Data: reading prompts, drawing groups of samples from them, and dealing finished samples to the trainer's ranks."""

from vime.data.source import PromptSource

__all__ = ["PromptSource"]
