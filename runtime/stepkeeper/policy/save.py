"""Save policies: frozen values, asked after each step. Clocks come in as arguments."""

from dataclasses import dataclass
from typing import Protocol

from stepkeeper.contract import Interval

__all__ = ["AnyOf", "AtStep", "EveryNSteps", "EverySeconds", "SavePolicy", "from_interval"]


class SavePolicy(Protocol):
    """Decides whether the step that was just finished is to be saved."""

    @property
    def by_step_alone(self) -> bool:
        """True if every rank comes to the same answer without asking the others."""
        ...

    def due(self, step: int, since_save_s: float) -> bool:
        """True if `step` is to be saved, the last save having begun `since_save_s` ago."""
        ...


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save the steps that are multiples of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a save interval has at least 1 step, not {self.steps}")

    @property
    def by_step_alone(self) -> bool:
        return True

    def due(self, step: int, since_save_s: float) -> bool:  # noqa: ARG002  # the protocol's signature
        return step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save began."""

    seconds: float

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"a save interval is longer than 0 s, not {self.seconds}")

    @property
    def by_step_alone(self) -> bool:
        return False

    def due(self, step: int, since_save_s: float) -> bool:  # noqa: ARG002  # the protocol's signature
        return since_save_s >= self.seconds


@dataclass(frozen=True, slots=True)
class AtStep:
    """Save one step: the last one of a training, whose result is what it was run for."""

    step: int

    @property
    def by_step_alone(self) -> bool:
        return True

    def due(self, step: int, since_save_s: float) -> bool:  # noqa: ARG002  # the protocol's signature
        return step == self.step


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Save when one of `policies` says so."""

    policies: tuple[SavePolicy, ...]

    @property
    def by_step_alone(self) -> bool:
        return all(policy.by_step_alone for policy in self.policies)

    def due(self, step: int, since_save_s: float) -> bool:
        return any(policy.due(step, since_save_s) for policy in self.policies)


def from_interval(interval: Interval, *, total_steps: int | None = None) -> SavePolicy:
    """The policy that a job's settings ask for; the last of `total_steps` is saved whatever the interval."""
    policies: list[SavePolicy] = []
    if interval.steps is not None:
        policies.append(EveryNSteps(interval.steps))
    if interval.seconds is not None:
        policies.append(EverySeconds(interval.seconds))
    if total_steps is not None:
        policies.append(AtStep(total_steps))
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies))
