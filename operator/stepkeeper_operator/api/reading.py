"""Read an object whose parts may be of another version: what can't be read is left out and named."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stepkeeper_operator.api.base import ApiModel

__all__ = ["Reading", "describe_problems", "read_object"]

_ROUNDS: Final = 16
"""Leaving a part out can leave the part around it unreadable."""

T = TypeVar("T", bound=ApiModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[T]):
    """An object as far as it can be read."""

    value: T | None
    """None: a part without which there is no object can't be read."""

    problems: tuple[str, ...] = ()
    """Path and reason of each part of the spec that can't be read."""


def describe_problems(problems: Sequence[str]) -> str:
    """Say which parts of a spec can't be read, and what to do."""
    parts = "; ".join(problems)
    return f"this operator can't read {parts}. Correct it, or upgrade the operator; running pods are not affected"


def read_object(kind: type[T], raw: object) -> Reading[T]:
    """Read the object. Of its status nothing is named: a newer operator may have written it."""
    problems: dict[str, str] = {}
    known = raw
    for _ in range(_ROUNDS):
        try:
            return Reading(value=kind.model_validate(known), problems=tuple(problems.values()))
        except ValidationError as error:
            known = copy.deepcopy(known)
            # From the back, so that the numbers of the others in a list stay right.
            for detail in reversed(error.errors(include_url=False)):
                path = _render(detail["loc"])
                # A part that was left out makes the part around it unreadable, too.
                if not path.startswith("status") and not any(each.startswith(path) for each in problems):
                    problems[path] = f"{path}: {_describe(detail)}"
                if not _leave_out(known, detail):
                    return Reading(value=None, problems=tuple(problems.values()))
    return Reading(value=None, problems=tuple(problems.values()))


def _leave_out(raw: Any, detail: ErrorDetails) -> bool:
    """Take the part out of `raw`. Return False if it can't be: it is there in every object."""
    path = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]
    if len(path) < 2:
        return False
    found = raw
    for key in path[:-1]:
        if isinstance(found, dict) and key not in found:
            return True  # another problem took the part around it out
        found = found[key]
    last = path[-1]
    if detail["type"] == "too_long" and isinstance(found[last], list):
        # The newest are at the end.
        found[last] = found[last][-detail["ctx"]["max_length"] :]
    elif isinstance(found, dict):
        found.pop(last, None)
    else:
        del found[last]
    return True


def _describe(detail: ErrorDetails) -> str:
    return "is no object" if detail["type"] == "model_type" else detail["msg"]


def _render(path: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
