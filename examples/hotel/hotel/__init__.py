"""A hotel reservation in four stages: explore, present, compare, book."""

from .flow import HotelFlow

__all__ = ["HotelFlow"]
