"""Flags, YAML files and the rules between them. ``parse_config(argv)`` is the only way to a Config."""

from vime.config.config import Args, Config
from vime.config.parse import Resolution, parse_config, parse_or_exit, resolve
from vime.config.reference import help_text

__all__ = ["Args", "Config", "Resolution", "help_text", "parse_config", "parse_or_exit", "resolve"]
