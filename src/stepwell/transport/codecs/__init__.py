"""Codecs: UI messages and plain text, and what one of one's own is made of: a `TableCodec` with an `EventTable`."""

from ._fields import Field, choice_field, flag_field, json_field, text_field
from ._outcome import FinishReason, RunOutcome, run_outcome
from ._table import EventTable, Input, Output, Repair, Stream, UserMessage
from ._table_codec import TableCodec, TableEncoder
from ._text import TextCodec, TextMessage
from ._ui import UIMessageCodec, create_tool_result_fork
from ._ui_fold import UIMessage, UIPart

__all__ = [
    "EventTable",
    "Field",
    "FinishReason",
    "Input",
    "Output",
    "Repair",
    "RunOutcome",
    "Stream",
    "TableCodec",
    "TableEncoder",
    "TextCodec",
    "TextMessage",
    "UIMessage",
    "UIMessageCodec",
    "UIPart",
    "UserMessage",
    "choice_field",
    "create_tool_result_fork",
    "flag_field",
    "json_field",
    "run_outcome",
    "text_field",
]
