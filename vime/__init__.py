"""vime: reinforcement-learning post-training for language and vision-language models."""

__version__ = "0.1.0"
