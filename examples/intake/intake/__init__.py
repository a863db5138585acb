"""A patient intake: name, date of birth, address, then review; minors pass by a guardian."""

from .flow import IntakeFlow

__all__ = ["IntakeFlow"]
