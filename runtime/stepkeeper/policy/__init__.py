"""Policies that decide when to save and what to keep, as small frozen values that combine."""

from stepkeeper.policy import keep, save

__all__ = ["keep", "save"]
