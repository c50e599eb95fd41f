"""When to save, as small values that combine."""

from stepkeeper.policy.save import AnyOf, AtStep, EveryNSteps, EverySeconds, SavePolicy, from_interval

__all__ = ["AnyOf", "AtStep", "EveryNSteps", "EverySeconds", "SavePolicy", "from_interval"]
