"""Read a pickle without running it: Python's own reader, limited to a few opcodes and to the names of plain data.

Only bytes that are in memory are looked at and kept: no memory is allocated for a length that a pickle claims.
"""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, final

from typing_extensions import override

from stepkeeper_planners.errors import PickleRefusedError, UnknownNameError, printable

__all__ = ["Draft", "Maker", "Name", "unpickle"]

Name = tuple[str, str]

_SCALARS: Final = frozenset({str, int, bool, float, complex, bytes, type(None)})
_MAX_PLACES: Final = 8
"""The most places of names that aren't allowed that a message shows."""
_MAX_PLACE_DEPTH: Final = 32

# The makers, Python's reader and its containers raise these on invalid input.
_INVALID_INPUT: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    struct.error,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class Maker:
    """Stands for an allowed function or class. Only the pickle's own calls use it."""

    name: Name
    make: Callable[..., object]


@final
@dataclass(slots=True, eq=False)
class Draft:
    """Stands for an object until its state is set, which happens exactly once."""

    finish: Callable[[Any], object]
    """Makes the object from its state."""
    made: object = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Unknown:
    """Stands for a name that isn't allowed, and for everything that the pickle makes from it.

    Reading continues with it to the end, so that the message can show where it is. The reader appends items to it.
    """

    name: Name

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass


def unpickle(
    data: bytes | memoryview,
    names: Mapping[Name, object],
    *,
    persistent: Callable[[object], object] | None = None,
    key_types: frozenset[type] = frozenset(),
) -> Any:
    """Read the object that the pickle holds.

    Args:
        data: the pickle.
        names: the allowed names. A callable makes objects or drafts, and checks the arguments. A callable that
            is an argument itself is passed as its `Maker`.
        persistent: returns the object outside of the pickle that has this id.
        key_types: types of dict keys, in addition to plain scalars and tuples of these.

    Raises:
        UnknownNameError: it names something else.
        PickleRefusedError: it has an opcode that plain data doesn't need, or is damaged.
    """
    reader = _Reader(data, names, persistent, key_types)
    tree: object = None
    places, failure = "", None
    try:
        tree = reader.load()
        reader.check_finished()
        if reader.first_unknown is not None:
            places = "".join(islice(_describe_places(tree, (), set()), _MAX_PLACES))
    except _INVALID_INPUT as error:
        failure = error
    if reader.first_unknown is not None:
        raise UnknownNameError(
            f"it names {_dotted(reader.first_unknown)}, which isn't allowed in it; it was not run{places}"
        ) from failure
    if isinstance(failure, PickleRefusedError):
        raise failure
    if isinstance(failure, EOFError):
        raise PickleRefusedError("it ends too early") from failure
    if failure is not None:
        raise PickleRefusedError(f"it is damaged ({type(failure).__name__}: {failure})") from failure
    return tree


@final
class _Memo(dict[int, Any]):
    """Return numbered objects of the pickle: what was made from a draft, so that only the stack ever has the draft."""

    @override
    def __getitem__(self, place: int) -> Any:
        kept = super().__getitem__(place)
        if type(kept) is not Draft:
            return kept
        if kept.made is None:
            raise PickleRefusedError("it uses an object before its state is set")
        return kept.made


@final
class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise PickleRefusedError(f"it has opcode {bytes([code])!r}, which plain data doesn't need")


# The reader in C believes a pickle's lengths and indexes, and gives states and items to any object.
@final
class _Reader(pickle._Unpickler):  # noqa: SLF001 — pickle.Unpickler has no table of opcodes
    """Make only containers, scalars, and the objects that the names make."""

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        data: bytes | memoryview,
        names: Mapping[Name, object],
        persistent: Callable[[object], object] | None,
        key_types: frozenset[type],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.memo = _Memo()
        self.first_unknown: _Unknown | None = None
        self._names, self._persistent = names, persistent
        self._key_types = _SCALARS | key_types
        self._n_drafts = 0

    def check_finished(self) -> None:
        if self.stack or self.metastack:
            raise PickleRefusedError("it leaves something on the stack")
        if self._n_drafts:
            raise PickleRefusedError("it holds an object without a state")

    @override
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in self._names:
            known = self._names[module, name]
            return Maker((module, name), known) if callable(known) else known
        unknown = _Unknown((module, name))
        self.first_unknown = self.first_unknown or unknown
        return unknown

    @override
    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise PickleRefusedError("it refers to something outside")
        return self._persistent(pid)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is _Unknown:
            made: object = function
        elif type(function) is Maker and type(arguments) is tuple:
            made = function.make(*arguments)
        else:
            raise PickleRefusedError(f"it calls a {type(function).__name__}")
        self._n_drafts += type(made) is Draft
        self.stack.append(made)

    def build(self) -> None:
        state, instance = self.stack.pop(), self.stack.pop()
        if type(instance) is Draft and instance.made is None:
            instance.made = instance.finish(state)
            self._n_drafts -= 1
            self.stack.append(instance.made)
        # nn.Module.state_dict() keeps its modules' versions on the dict; no load of a checkpoint uses them.
        elif type(instance) in (OrderedDict, _Unknown):
            self.stack.append(instance)
        else:
            raise PickleRefusedError(f"it sets the state of a {type(instance).__name__}")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is _Unknown:
            return
        if type(target) not in (dict, OrderedDict):
            raise PickleRefusedError(f"it sets an item of a {type(target).__name__}")
        keys = items[::2]
        for key in keys:
            # Hashing an endlessly nested key would crash the process.
            parts = key if type(key) is tuple else (key,)
            if not all(type(part) in self._key_types for part in parts):
                raise PickleRefusedError(f"a {type(key).__name__} is a dict key")
        target.update(zip(keys, items[1::2], strict=True))

    # fmt: off
    dispatch = _Opcodes({
        code[0]: pickle._Unpickler.dispatch[code[0]]  # noqa: SLF001 — as above
        for code in (
            pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.POP, pickle.POP_MARK,
            pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT,
            pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4,
            pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
            pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
            pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
            pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
            pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID,
            pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
        )
    } | {
        pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items,
        pickle.REDUCE[0]: call, pickle.NEWOBJ[0]: call, pickle.BUILD[0]: build,
    })
    # fmt: on


def _dotted(unknown: _Unknown) -> str:
    return printable(".".join(unknown.name))


def _describe_places(node: object, keys: tuple[str, ...], seen: set[int]) -> Iterator[str]:
    """Describe where unknown objects are, by their keys. Each object is visited once."""
    if isinstance(node, _Unknown):
        yield f"; at {printable('.'.join(keys))}: {_dotted(node)}"
    elif isinstance(node, dict | list | tuple) and id(node) not in seen and len(keys) < _MAX_PLACE_DEPTH:
        seen.add(id(node))
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _describe_places(part, (*keys, str(key)), seen)
