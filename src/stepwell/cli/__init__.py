"""The command `stepwell`. Everything but the parser is imported when its command runs."""

from ._app import app, main

__all__ = ["app", "main"]
