"""When to save, and what to keep, as small frozen values that combine: `policy.save` and `policy.keep`."""

from stepkeeper.policy import keep, save

__all__ = ["keep", "save"]
