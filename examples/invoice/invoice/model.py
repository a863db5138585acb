"""What an invoice is, and what must add up."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, Field

Money = Annotated[float, Field(ge=0)]


class Line(BaseModel):
    """One position."""

    description: str = Field(description="item")
    quantity: float = Field(description="quantity", gt=0)
    unit_price: Money = Field(description="price of one")
    amount: Money = Field(description="amount of the line")


class Invoice(BaseModel):
    """An invoice, as it stands on paper."""

    number: str = Field(description="invoice number")
    issued: date = Field(description="date of issue, invoice date")
    due: date | None = Field(None, description="due date, payable until")
    seller: str = Field(description="seller, supplier, from")
    buyer: str = Field(description="buyer, customer, bill to")
    currency: Literal["EUR", "USD", "GBP"] = Field(description="EUR = euro, €; USD = dollar; GBP = pound")
    lines: list[Line] = Field(description="positions", min_length=1)
    net: Money = Field(description="net amount, subtotal")
    vat: Money = Field(0, description="VAT, tax")
    total: Money = Field(description="total amount, to pay")

    def problems(self) -> list[str]:
        """What does not add up."""
        exact = {name: Decimal(str(getattr(self, name))) for name in ("net", "vat", "total")}
        found = [
            f"line {index}: {one.quantity} x {one.unit_price} is not {one.amount}"
            for index, one in enumerate(self.lines, 1)
            if abs(one.quantity * one.unit_price - one.amount) >= 0.005
        ]
        if sum(Decimal(str(one.amount)) for one in self.lines) != exact["net"]:
            found.append("the lines do not add up to the net amount")
        if exact["net"] + exact["vat"] != exact["total"]:
            found.append("net and VAT do not add up to the total")
        return found
