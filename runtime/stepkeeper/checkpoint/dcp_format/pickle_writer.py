"""Write pickles that name torch's classes, opcode by opcode, without torch and without stand-in classes.

They use protocol 2, and only opcodes that torch's restricted unpickler (weights_only) knows.
"""

import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

__all__ = ["Call", "Global", "Instance", "Pairs", "Persistent", "encode_pickle"]


class Global(NamedTuple):
    """A class, function or other value that the unpickler finds by name."""

    module: str
    name: str


class Call(NamedTuple):
    """The result of `function(*arguments)`."""

    function: Global
    arguments: tuple[object, ...]


class Instance(NamedTuple):
    """The object that `cls.__new__(cls)` returns. Unless `state` is None, it is passed to __setstate__ or __dict__."""

    cls: Global
    state: object = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict, whose keys need not be hashable here."""

    items: Iterable[tuple[object, object]]
    """Iterated once. Each pair may be generated when its turn comes."""


class Persistent(NamedTuple):
    """The object that the unpickler's persistent_load returns for `identity`."""

    identity: object


_SMALL_TUPLES: Final = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}


def encode_pickle(value: object) -> bytes:
    """Pickle `value`, made of these classes, None, bool, int, str, tuple, list and dict. Raises TypeError."""
    writer = _Writer()
    writer.add(value)
    writer.written += pickle.STOP
    return bytes(writer.written)


@final
class _Writer:
    def __init__(self) -> None:
        self.written = bytearray(pickle.PROTO + b"\x02")
        self._memo: dict[object, bytes] = {}
        """The opcode that refers to each value written before."""

    def add(self, value: object) -> None:
        method = _METHODS.get(type(value))
        if method is None:
            raise TypeError(f"{type(value).__name__} can't be stored in a checkpoint's metadata")
        method(self, value)

    def add_none(self, _: None) -> None:
        self.written += pickle.NONE

    def add_bool(self, value: bool) -> None:
        self.written += pickle.NEWTRUE if value else pickle.NEWFALSE

    def add_int(self, value: int) -> None:
        self.written += _encode_integer(value)

    def add_str(self, value: str) -> None:
        if not self._write_memoized(value):
            text = value.encode("utf-8", "surrogatepass")
            self.written += pickle.BINUNICODE + struct.pack("<I", len(text)) + text
            self._memoize(value)

    def add_global(self, value: Global) -> None:
        if not self._write_memoized(value):
            self.written += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
            self._memoize(value)

    def add_call(self, value: Call) -> None:
        """Add a call. Equal calls share one object: they build sizes and layouts, which never change."""
        if not self._write_memoized(value):
            self.add_global(value.function)
            self.add_tuple(value.arguments)
            self.written += pickle.REDUCE
            self._memoize(value)

    def add_tuple(self, value: tuple[object, ...]) -> None:
        # The opcode of a tuple with up to 3 items. The items of a longer one begin at a mark.
        short = _SMALL_TUPLES.get(len(value))
        if short is None:
            self.written += pickle.MARK
        for item in value:
            self.add(item)
        self.written += short or pickle.TUPLE

    def add_list(self, value: list[object]) -> None:
        self.written += pickle.EMPTY_LIST + pickle.MARK
        for item in value:
            self.add(item)
        self.written += pickle.APPENDS

    def add_dict(self, value: dict[object, object]) -> None:
        self._add_items(value.items())

    def add_pairs(self, value: Pairs) -> None:
        self._add_items(value.items)

    def add_instance(self, value: Instance) -> None:
        self.add_global(value.cls)
        self.written += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if value.state is not None:
            self.add(value.state)
            self.written += pickle.BUILD

    def add_persistent(self, value: Persistent) -> None:
        self.add(value.identity)
        self.written += pickle.BINPERSID

    def _add_items(self, items: Iterable[tuple[object, object]]) -> None:
        self.written += pickle.EMPTY_DICT + pickle.MARK
        for key, item in items:
            self.add(key)
            self.add(item)
        self.written += pickle.SETITEMS

    def _write_memoized(self, value: object) -> bool:
        """Write a reference to the value if it is in the memo. Return True if it is."""
        get = self._memo.get(value)
        if get is not None:
            self.written += get
        return get is not None

    def _memoize(self, value: object) -> None:
        place = len(self._memo)
        short = place < 256
        number = struct.pack("<B" if short else "<I", place)
        self._memo[value] = (pickle.BINGET if short else pickle.LONG_BINGET) + number
        self.written += (pickle.BINPUT if short else pickle.LONG_BINPUT) + number


_METHODS: Final[dict[type, Callable[[_Writer, Any], None]]] = {
    type(None): _Writer.add_none,
    bool: _Writer.add_bool,
    int: _Writer.add_int,
    str: _Writer.add_str,
    tuple: _Writer.add_tuple,
    list: _Writer.add_list,
    dict: _Writer.add_dict,
    Global: _Writer.add_global,
    Call: _Writer.add_call,
    Instance: _Writer.add_instance,
    Pairs: _Writer.add_pairs,
    Persistent: _Writer.add_persistent,
}


def _encode_integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + bytes([value])
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(data)]) + data
