"""An invoice becomes JSON: one shot, a schema, and checks in code."""

from .flow import InvoiceFileFlow, InvoiceFlow
from .model import Invoice, Line

__all__ = ["Invoice", "InvoiceFileFlow", "InvoiceFlow", "Line"]
