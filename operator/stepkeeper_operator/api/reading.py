"""Read an object of any version: leave out and report the unreadable parts, and keep unknown parts of its status."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stepkeeper_operator.api.base import ApiModel, StatusPart

__all__ = ["Reading", "describe_problems", "keep_unknown", "read_object"]

_MAX_READS: Final = 16
"""Most reads of one object. Without a part that was left out, the part around it can be unreadable at the next read."""

T = TypeVar("T", bound=ApiModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[T]):
    """The readable parts of an object."""

    value: T | None
    """None: a required part is unreadable, and nothing stands in for it."""

    problems: tuple[str, ...] = ()
    """Path and reason of each unreadable part of the spec."""


def describe_problems(problems: Sequence[str]) -> str:
    """Describe the unreadable parts of a spec, and what to do."""
    parts = "; ".join(problems)
    return f"this operator can't read {parts}. Fix the spec, or upgrade the operator; running pods are not affected"


def read_object(kind: type[T], raw: object, *, stand_in: Mapping[str, Any] | None = None) -> Reading[T]:
    """Read the object. Problems in its status are not reported: a newer operator may have written it.

    Parts of `stand_in` take the place of required parts that are absent or unreadable.
    """
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
                if not (_fill_in(rest, detail, stand_in or {}) or _leave_out(rest, detail)):
                    return Reading(value=None, problems=tuple(problems.values()))
    return Reading(value=None, problems=tuple(problems.values()))


def _fill_in(raw: Any, detail: ErrorDetails, stand_in: Any) -> bool:
    """Put the part of `stand_in` into `raw` where a required part is absent, or all is unreadable."""
    *path, last = detail["loc"]
    if path and detail["type"] != "missing":
        return False
    for key in path:
        if not (isinstance(raw, dict) and isinstance(stand_in, Mapping)):
            return False
        raw, stand_in = raw.get(key), stand_in.get(key)
    if not (isinstance(raw, dict) and isinstance(stand_in, Mapping) and last in stand_in):
        return False
    raw[last] = copy.deepcopy(stand_in[last])
    return True


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


def keep_unknown(kind: type[StatusPart], before: Any, after: Mapping[str, Any]) -> dict[str, Any]:
    """Return status `after`, with the fields of `before` that this version doesn't know: a newer operator wrote them.

    A part whose first field is required is identified by it, as a commit by its sequence: another one gets no fields.
    """
    names = {field.alias or name: field for name, field in kind.model_fields.items()}
    first = _first_field(kind)
    if not isinstance(before, dict) or (names[first].is_required() and before.get(first) != after.get(first)):
        return dict(after)
    kept = {name: value for name, value in before.items() if name not in names} | dict(after)
    for name in before.keys() & after.keys() & names.keys():
        part, old, new = _find_part(names[name].annotation), before[name], after[name]
        if part is not None and isinstance(new, dict):
            kept[name] = keep_unknown(part, old, new)
        elif part is not None and isinstance(old, list):
            key = _first_field(part)
            items = {str(item.get(key)): item for item in old if isinstance(item, dict)}
            kept[name] = [keep_unknown(part, items.get(str(item[key])), item) for item in new]
    return kept


def _first_field(kind: type[StatusPart]) -> str:
    return next(field.alias or name for name, field in kind.model_fields.items())


def _find_part(annotation: object) -> type[StatusPart] | None:
    """Find the type of a field's value, or of the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, StatusPart):
        return annotation
    return next(filter(None, map(_find_part, get_args(annotation))), None)
