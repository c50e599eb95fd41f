"""Carry a policy that selects which commits to keep from the trainer to the companion process."""

from dataclasses import dataclass
from typing import Final

from stepkeeper.policy.keep import AnyOf, BestN, EveryNSteps, EverySeconds, KeepPolicy, LastN, MaxAge

__all__ = ["Keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Carry a policy to another process, as lists of the policies of `policy.keep`."""

    last: tuple[LastN, ...] = ()
    steps: tuple[EveryNSteps, ...] = ()
    seconds: tuple[EverySeconds, ...] = ()
    best: tuple[BestN, ...] = ()
    age: tuple[MaxAge, ...] = ()

    @classmethod
    def from_policy(cls, policy: KeepPolicy) -> "Keep":
        """Sort the parts of `policy` by type.

        Raises:
            TypeError: A part isn't one of those policies: the companion process couldn't know it.

        """
        parts: dict[str, list[KeepPolicy]] = {name: [] for name in _FIELDS.values()}
        waiting = [policy]
        while waiting:
            part = waiting.pop(0)
            if isinstance(part, AnyOf):
                waiting = [*part.policies, *waiting]
            elif type(part) in _FIELDS:
                parts[_FIELDS[type(part)]].append(part)
            else:
                known = ", ".join(kind.__name__ for kind in (*_FIELDS, AnyOf))
                raise TypeError(f"{part!r} is no policy of stepkeeper.policy.keep, which has {known}")
        return cls(**{name: tuple(found) for name, found in parts.items()})  # type: ignore[arg-type]  # sorted by type

    @property
    def policy(self) -> AnyOf:
        """The same policy as one object."""
        return AnyOf((*self.last, *self.steps, *self.seconds, *self.best, *self.age))

    @property
    def needs_times(self) -> bool:
        """True if the times of commits make a difference."""
        return bool(self.seconds or self.age)


_FIELDS: Final[dict[type, str]] = {
    LastN: "last",
    EveryNSteps: "steps",
    EverySeconds: "seconds",
    BestN: "best",
    MaxAge: "age",
}
