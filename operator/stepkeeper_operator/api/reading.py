"""Read an object that may be of another version: leave out and report the unreadable parts."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stepkeeper_operator.api.base import ApiModel

__all__ = ["Reading", "describe_problems", "read_object"]

_MAX_READS: Final = 16
"""Most reads of one object. Without a part that was left out, the part around it can be unreadable at the next read."""

T = TypeVar("T", bound=ApiModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[T]):
    """The readable parts of an object."""

    value: T | None
    """None: a required part is unreadable."""

    problems: tuple[str, ...] = ()
    """Path and reason of each unreadable part of the spec."""


def describe_problems(problems: Sequence[str]) -> str:
    """Describe the unreadable parts of a spec, and what to do."""
    parts = "; ".join(problems)
    return f"this operator can't read {parts}. Fix the spec, or upgrade the operator; running pods are not affected"


def read_object(kind: type[T], raw: object) -> Reading[T]:
    """Read the object. Problems in its status are not reported: a newer operator may have written it."""
    problems: dict[str, str] = {}
    rest = raw
    for _ in range(_MAX_READS):
        try:
            return Reading(value=kind.model_validate(rest), problems=tuple(problems.values()))
        except ValidationError as error:
            rest = copy.deepcopy(rest)
            # In reverse order, so that the indices of the other items of a list stay correct.
            for detail in reversed(error.errors(include_url=False)):
                path = _render(detail["loc"])
                # A part around a reported one is unreadable only because that one was left out.
                around_reported = any(each.startswith(path) for each in problems)
                if not path.startswith("status") and not around_reported:
                    problems[path] = f"{path}: {_describe(detail)}"
                if not _leave_out(rest, detail):
                    return Reading(value=None, problems=tuple(problems.values()))
    return Reading(value=None, problems=tuple(problems.values()))


def _leave_out(raw: Any, detail: ErrorDetails) -> bool:
    """Remove the unreadable part from `raw`. Return False for a top-level part, without which nothing can be read."""
    # A part that lacks a required field is removed as a whole.
    path = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]
    if len(path) < 2:
        return False
    found = raw
    for key in path[:-1]:
        if isinstance(found, dict) and key not in found:
            return True  # the enclosing part was removed for another problem
        found = found[key]
    last = path[-1]
    if detail["type"] == "too_long" and isinstance(found[last], list):
        # The newest items are at the end.
        found[last] = found[last][-detail["ctx"]["max_length"] :]
    elif isinstance(found, dict):
        found.pop(last, None)
    else:
        del found[last]
    return True


def _describe(detail: ErrorDetails) -> str:
    return "is not an object" if detail["type"] == "model_type" else detail["msg"]


def _render(path: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
