"""Floor 1: the typed configuration. Imports pydantic and yaml, never torch."""

from reinforge.config.schema import Config

__all__ = ["Config"]
