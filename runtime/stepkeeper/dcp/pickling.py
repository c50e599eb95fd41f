"""A pickle that names classes of torch, written opcode by opcode: no torch, and no stand-ins that could leak.

Protocol 2, and only opcodes that torch's restricted unpickler (weights_only) knows.
"""

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

__all__ = ["Call", "Global", "Instance", "Pairs", "Persistent", "pickled"]


@dataclass(frozen=True, slots=True)
class Global:
    """A class, function or other value that the unpickler finds by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What `function(*arguments)` returns."""

    function: Global
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object made by `cls.__new__(cls)` and given `state`, as __setstate__ or __dict__ take it."""

    cls: Global
    state: object


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict, also of keys that can't be hashed here."""

    items: Sequence[tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Persistent:
    """What the unpickler's persistent_load makes of `identity`."""

    identity: object


_SMALL_TUPLES: Final = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}


def pickled(value: object) -> bytes:
    """`value`, made of the classes above and of None, bool, int, str, tuple, list and dict. Raises TypeError."""
    writer = _Writer()
    writer.add(value)
    return b"\x80\x02" + b"".join(writer.opcodes) + pickle.STOP


@final
class _Writer:
    def __init__(self) -> None:
        self.opcodes: list[bytes] = []
        self._memo: dict[object, bytes] = {}

    def add(self, value: object) -> None:  # noqa: C901, PLR0912  # one case per kind of value
        out = self.opcodes
        match value:
            case None:
                out.append(pickle.NONE)
            case bool():
                out.append(pickle.NEWTRUE if value else pickle.NEWFALSE)
            case int():
                out.append(_integer(value))
            case str() | Global():
                self._add_memoized(value)
            case tuple():
                self._add_tuple(value)
            case list():
                out.append(pickle.EMPTY_LIST + pickle.MARK)
                for item in value:
                    self.add(item)
                out.append(pickle.APPENDS)
            case dict():
                self.add(Pairs(tuple(value.items())))
            case Pairs(items):
                out.append(pickle.EMPTY_DICT + pickle.MARK)
                for key, item in items:
                    self.add(key)
                    self.add(item)
                out.append(pickle.SETITEMS)
            case Call(function, arguments):
                self.add(function)
                self._add_tuple(arguments)
                out.append(pickle.REDUCE)
            case Instance(cls, state):
                self.add(cls)
                out.append(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
                self.add(state)
                out.append(pickle.BUILD)
            case Persistent(identity):
                self.add(identity)
                out.append(pickle.BINPERSID)
            case _:
                raise TypeError(f"{type(value).__name__} has no place in a checkpoint's metadata")

    def _add_tuple(self, value: tuple[object, ...]) -> None:
        short = _SMALL_TUPLES.get(len(value))
        if short is None:
            self.opcodes.append(pickle.MARK)
        for item in value:
            self.add(item)
        self.opcodes.append(short or pickle.TUPLE)

    def _add_memoized(self, value: str | Global) -> None:
        known = self._memo.get(value)
        if known is not None:
            self.opcodes.append(known)
            return
        if isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            opcode = pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        else:
            opcode = pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        place = len(self._memo)
        put = pickle.BINPUT + bytes([place]) if place < 256 else pickle.LONG_BINPUT + struct.pack("<I", place)
        get = pickle.BINGET + bytes([place]) if place < 256 else pickle.LONG_BINGET + struct.pack("<I", place)
        self._memo[value] = get
        self.opcodes.append(opcode + put)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + bytes([value])
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(data)]) + data
