"""Decide when to save and what to keep, by small frozen values that combine: `policy.save` and `policy.keep`."""

from stepkeeper.policy import keep, save

__all__ = ["keep", "save"]
