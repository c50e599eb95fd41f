"""Decode JSON objects into frozen values. A missing key or a wrong type is an error that names its path.

There are two readers. `decode` is for stored data, and for messages between processes of one version: an unknown key or
value is an error. `decode_message` is for messages between operator and pods, which may have different versions: it
ignores unknown parts, and refuses only a newer `format`.

A field's JSON name is its Python name. Supported annotations: bool, int, str, StrEnum classes, values made of these
(nested dataclasses), ``X | None``, ``tuple[X, ...]``, ``dict[str, str]``, ``Annotated[X, AtMost(n)]`` and
``Annotated[X, Else(value)]``. A whole number is from 0 to 2**53, the range that every JSON reader keeps. A string is
valid UTF-8 text. Bounds are checked in data that is read, not in values that this process makes.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

__all__ = [
    "MESSAGE_FORMAT",
    "AtMost",
    "ContractError",
    "Else",
    "UnknownMemberError",
    "decode",
    "decode_message",
    "encode",
    "encode_json",
    "list_unknown",
]

T = TypeVar("T")

MESSAGE_FORMAT: Final = 1
"""The newest format of messages that this version reads. A message without the key `format` has format 1. A writer uses
a greater one only where a reader that ignores unknown parts would do harm."""

_FORMAT_KEY: Final = "format"
_MAX_INT: Final = 2**53


class ContractError(ValueError):
    """Raised when bytes from the other side of a process boundary break the contract."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """The greatest allowed number, or length of a string in characters."""

    limit: int


@dataclass(frozen=True, slots=True)
class Else:
    """The value that replaces one with an unknown member of an enum or a union."""

    value: object


class UnknownMemberError(ContractError):
    """Raised when this version of an enum or a union has no such member."""


def encode(value: Any) -> Any:
    """Convert ``value`` into plain JSON types. Fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: encode(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    return value


def encode_json(value: Any) -> bytes:
    """Encode ``value`` as compact JSON with sorted keys: equal values give equal bytes."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":")).encode()


def decode_message(kind: type[T], data: bytes | str) -> T:
    """Decode a message of the other side, which may have an older or a newer version.

    Unknown keys are ignored. A value with an unknown enum member is replaced by the field's `Else`. Raises
    ContractError, which names the path of the fault, for other data or a newer format.
    """
    return typing.cast(T, _decode_message(kind, data, []))


def list_unknown(kind: type, data: bytes | str) -> tuple[str, ...]:
    """List the paths of keys, and the values, that `decode_message` ignores."""
    ignored: list[str] = []
    _decode_message(kind, data, ignored)
    return tuple(ignored)


def decode(kind: type[T], raw: object) -> T:
    """Decode parsed JSON strictly into a value of `kind`. Raises ContractError, which names the fault."""
    return typing.cast(T, _decode(kind, raw, kind.__name__, None))


def _decode_message(kind: type, data: bytes | str, ignored: list[str]) -> object:
    path = kind.__name__
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{path}: not JSON: {error}") from error
    if isinstance(raw, dict) and _FORMAT_KEY in raw:
        written = _decode_scalar(int, raw.pop(_FORMAT_KEY), f"{path}.{_FORMAT_KEY}")
        if typing.cast(int, written) > MESSAGE_FORMAT:
            raise ContractError(
                f"{path}: format {written} is newer than {MESSAGE_FORMAT}, the newest that this version of stepkeeper "
                "reads: use the same or a newer version here"
            )
    return _decode(kind, raw, path, ignored)


def _decode(kind: Any, raw: object, path: str, ignored: list[str] | None) -> object:
    """Decode `raw`, and append the parts that this version doesn't know to `ignored`. None: decode strictly."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(kind, raw, path, ignored)
    if origin is Annotated:
        return _decode_annotated(kind, raw, path, ignored)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ContractError(f"{path}: expected a list, got {type(raw).__name__}")
        item_kind = typing.get_args(kind)[0]
        return tuple(_decode(item_kind, item, f"{path}[{i}]", ignored) for i, item in enumerate(raw))
    if origin is dict:
        return _decode_strings(raw, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, raw, path, ignored)
    return _decode_scalar(kind, raw, path)


def _decode_annotated(kind: Any, raw: object, path: str, ignored: list[str] | None) -> object:
    inner, mark = typing.get_args(kind)
    if isinstance(mark, Else):
        return _decode_or_else(inner, mark, raw, path, ignored)
    value = _decode(inner, raw, path, ignored)
    if isinstance(value, str) and len(value) > mark.limit:
        raise ContractError(f"{path}: expected at most {mark.limit} characters, got {len(value)}")
    if isinstance(value, int) and value > mark.limit:
        raise ContractError(f"{path}: expected at most {mark.limit}, got {value}")
    return value


def _decode_or_else(kind: Any, mark: Else, raw: object, path: str, ignored: list[str] | None) -> object:
    try:
        return _decode(kind, raw, path, ignored)
    except UnknownMemberError as error:
        if ignored is None:
            raise
        ignored.append(str(error))
        return mark.value


def _decode_optional(kind: Any, raw: object, path: str, ignored: list[str] | None) -> object:
    if raw is None:
        return None
    (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
    return _decode(inner, raw, path, ignored)


def _decode_strings(raw: object, path: str) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(v, str) for v in raw.values()):
        raise ContractError(f"{path}: expected an object of strings")
    return {_checked_text(key, path): _checked_text(value, f"{path}.{key}") for key, value in raw.items()}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _decode_dataclass(kind: Any, raw: object, path: str, ignored: list[str] | None) -> object:
    if not isinstance(raw, dict):
        raise ContractError(f"{path}: expected an object, got {type(raw).__name__}")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(fields)):
        if ignored is None:
            raise ContractError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
        ignored.extend(f"{path}.{name}" for name in unknown)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in raw:
            raise ContractError(f"{path}: key {name!r} is missing")
    try:
        return kind(
            **{
                name: _decode(hints[name], item, f"{path}.{name}", ignored)
                for name, item in raw.items()
                if name in fields
            }
        )
    except ContractError:
        raise
    except ValueError as error:  # from the class's own checks
        raise ContractError(f"{path}: {error}") from error


def _decode_scalar(kind: Any, raw: object, path: str) -> object:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(str(raw))
        except ValueError:
            known = ", ".join(member.value for member in kind)
            raise UnknownMemberError(f"{path}: {raw!r} is none of {known}") from None
    # bool is an int in Python, not in JSON.
    if type(raw) is not kind:
        raise ContractError(f"{path}: expected {kind.__name__}, got {type(raw).__name__}")
    if kind is int and not 0 <= typing.cast(int, raw) <= _MAX_INT:
        raise ContractError(f"{path}: expected a number from 0 to 2**53, got {raw}")
    return _checked_text(raw, path) if isinstance(raw, str) else raw


def _checked_text(text: str, path: str) -> str:
    """Check that the text is valid in UTF-8. JSON can escape half a surrogate pair, which UTF-8 can't encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContractError(f"{path}: half a surrogate pair is not valid text") from None
    return text
