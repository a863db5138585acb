"""Channels: where messages are kept and read from. What a channel is says `stepwell.wire.Channel`."""

from ._open import open_channels
from .memory import MemoryChannels

__all__ = ["MemoryChannels", "open_channels"]
