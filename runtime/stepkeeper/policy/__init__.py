"""When to save, as small values that combine."""

from stepkeeper.policy.save import AnyOf, EveryNSteps, EverySeconds, SavePolicy, from_interval

__all__ = ["AnyOf", "EveryNSteps", "EverySeconds", "SavePolicy", "from_interval"]
