"""Decode JSON objects strictly into frozen values: an unknown key, a missing key or a wrong type is an error.

A field's JSON name is its Python name. Supported annotations: bool, int, str, StrEnum classes, values made of
these (nested dataclasses), ``X | None``, ``tuple[X, ...]``, ``dict[str, str]`` and ``Annotated[X,
AtMost(n)]``. A whole number is from 0 to 2**53, the most that every JSON reader keeps; a string is text that
UTF-8 can carry. Bounds are checked in what is read, not in values that this process makes itself.
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

__all__ = ["AtMost", "ContractError", "decode", "decode_json", "encode", "encode_json"]

T = TypeVar("T")

_MAX_INT: Final = 2**53


class ContractError(ValueError):
    """Bytes from the other side of a process boundary break the contract."""


@dataclass(frozen=True, slots=True)
class AtMost:
    """The greatest number, or the most characters of a string."""

    limit: int


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


def decode_json(kind: type[T], data: bytes | str) -> T:
    """Decode JSON into a value.

    Args:
        kind: The dataclass of the value.
        data: The JSON.

    Raises:
        ContractError: The data is something else; the message names the path of what is wrong.

    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{kind.__name__}: not JSON: {error}") from error
    return decode(kind, raw)


def decode(kind: type[T], raw: object) -> T:
    """Decode parsed JSON into a value of ``kind``, as `decode_json` does."""
    return typing.cast(T, _decode(kind, raw, kind.__name__))


def _decode(kind: Any, raw: object, path: str) -> object:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(kind, raw, path)
    if origin is Annotated:
        return _decode_bounded(kind, raw, path)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ContractError(f"{path}: expected a list, got {type(raw).__name__}")
        item_kind = typing.get_args(kind)[0]
        return tuple(_decode(item_kind, item, f"{path}[{i}]") for i, item in enumerate(raw))
    if origin is dict:
        return _decode_strings(raw, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, raw, path)
    return _decode_scalar(kind, raw, path)


def _decode_bounded(kind: Any, raw: object, path: str) -> object:
    inner, bound = typing.get_args(kind)
    value = _decode(inner, raw, path)
    if isinstance(value, str) and len(value) > bound.limit:
        raise ContractError(f"{path}: expected at most {bound.limit} characters, got {len(value)}")
    if isinstance(value, int) and value > bound.limit:
        raise ContractError(f"{path}: expected at most {bound.limit}, got {value}")
    return value


def _decode_optional(kind: Any, raw: object, path: str) -> object:
    if raw is None:
        return None
    (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
    return _decode(inner, raw, path)


def _decode_strings(raw: object, path: str) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(v, str) for v in raw.values()):
        raise ContractError(f"{path}: expected an object of strings")
    return {_checked_text(key, path): _checked_text(value, f"{path}.{key}") for key, value in raw.items()}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _decode_dataclass(kind: Any, raw: object, path: str) -> object:
    if not isinstance(raw, dict):
        raise ContractError(f"{path}: expected an object, got {type(raw).__name__}")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(fields)):
        raise ContractError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in raw:
            raise ContractError(f"{path}: key {name!r} is missing")
    try:
        return kind(**{name: _decode(hints[name], item, f"{path}.{name}") for name, item in raw.items()})
    except ContractError:
        raise
    except ValueError as error:
        raise ContractError(f"{path}: {error}") from error


def _decode_scalar(kind: Any, raw: object, path: str) -> object:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(str(raw))
        except ValueError:
            known = ", ".join(member.value for member in kind)
            raise ContractError(f"{path}: {raw!r} is none of {known}") from None
    # bool is an int in Python, not in JSON.
    if type(raw) is not kind:
        raise ContractError(f"{path}: expected {kind.__name__}, got {type(raw).__name__}")
    if kind is int and not 0 <= typing.cast(int, raw) <= _MAX_INT:
        raise ContractError(f"{path}: expected a number from 0 to 2**53, got {raw}")
    return _checked_text(raw, path) if isinstance(raw, str) else raw


def _checked_text(text: str, path: str) -> str:
    """Check that UTF-8 can carry the text: JSON can name halves of a character, which nobody can write down."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContractError(f"{path}: a half of a surrogate pair is no text") from None
    return text
