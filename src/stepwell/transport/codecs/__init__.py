"""Codecs: UI messages and plain text, and what one of one's own is made of (`stepwell.transport.Codec`)."""

from ._fields import Field, choice, flag, json_value, text
from ._table import EventTable, InputEvent, Output, Repair, Stream, TableEncoder
from .text import TextCodec, TextMessage
from .ui import FinishReason, UIMessage, UIMessageCodec, tool_result_fork

__all__ = [
    "EventTable",
    "Field",
    "FinishReason",
    "InputEvent",
    "Output",
    "Repair",
    "Stream",
    "TableEncoder",
    "TextCodec",
    "TextMessage",
    "UIMessage",
    "UIMessageCodec",
    "choice",
    "flag",
    "json_value",
    "text",
    "tool_result_fork",
]
