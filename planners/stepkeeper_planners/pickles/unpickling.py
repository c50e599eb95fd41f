"""Reading a pickle without running it: names in it stay names, and a vocabulary says what each of them may make.

Only what stands in memory is ever looked at or kept: lengths that a pickle claims are no reason to allocate.
"""

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, final

from stepkeeper_planners.errors import PickleRefusedError, UnknownNameError

__all__ = ["GlobalName", "UnknownGlobal", "Vocabulary", "unpickle"]

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GlobalName:
    """Stands for a function or class of the vocabulary while the pickle is read; nothing can be done with it."""

    name: Name


@dataclass(frozen=True, slots=True, eq=False)
class UnknownGlobal:
    """Stands for what the vocabulary has no place for, and for all that the pickle makes of it."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """All that a pickle may name."""

    constants: Mapping[Name, object] = field(default_factory=dict)
    calls: Mapping[Name, Callable[..., object]] = field(default_factory=dict)
    """Makers, which check their arguments; a name as an argument comes as `GlobalName`."""
    classes: Mapping[Name, type] = field(default_factory=dict)
    """Of which empty instances may be made."""
    builds: Mapping[type, Callable[[Any, Any], object]] = field(default_factory=dict)
    """Instance and state → what stands in its place from then on. Each instance is built exactly once."""
    attributes: frozenset[type] = frozenset()
    """Of which instances may get attributes, which are passed over."""
    key_types: frozenset[type] = frozenset()
    """Of keys of dicts, beside plain scalars and tuples of those."""
    persistent: Callable[[object], object] | None = None
    keeps_unknown: bool = False
    """Other names are not refused; `UnknownGlobal` stands for them. Only to find out where they are."""


def unpickle(data: bytes, vocabulary: Vocabulary) -> object:
    """What the pickle holds.

    Raises:
        PickleRefusedError: it names something else, needs an opcode that data has no use for, or is damaged.
    """
    machine = _Machine(data, vocabulary)
    try:
        return machine.run()
    except PickleRefusedError:
        raise
    except _NONSENSE as error:
        if machine.at >= len(data):
            raise PickleRefusedError("it ends too early") from error
        raise PickleRefusedError(f"it is damaged ({type(error).__name__}: {error})") from error


# What the makers and Python's own containers raise on nonsense.
_NONSENSE: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)
_KEY_TYPES: Final = frozenset({str, int, bool, float, complex, bytes, type(None)})
_MARK: Final = object()


@final
class _Machine:
    """The stack and the memo of one reading."""

    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self.data = data
        self.at = 0
        self._vocabulary = vocabulary
        self._keys = _KEY_TYPES | vocabulary.key_types
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._globals: dict[Name, object] = {}
        self._open: dict[int, object] = {}
        """Instances that still have to get their state, by id."""
        self._replaced: dict[int, tuple[object, object]] = {}
        """Instances that gave way to another object. Both are kept: an id must not be used again."""

    def run(self) -> object:
        methods, data, stop = _METHODS, self.data, pickle.STOP[0]
        while True:
            if self.at >= len(data):
                self._refuse("it ends too early")
            code = data[self.at]
            self.at += 1
            if code == stop:
                break
            method = methods.get(code)
            if method is None:
                self._refuse(f"it has opcode {bytes([code])!r}, which data has no use for")
            method(self)
        if self._open:
            kinds = sorted({type(instance).__name__ for instance in self._open.values()})
            self._refuse(f"it holds a {kinds[0]} without a state")
        (result,) = self.stack
        return result

    def _refuse(self, reason: str) -> NoReturn:
        raise PickleRefusedError(f"{reason} (byte {self.at})")

    def _take(self, n_bytes: int) -> bytes:
        end = self.at + n_bytes
        if n_bytes < 0 or end > len(self.data):
            self._refuse("it ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _line(self) -> str:
        end = self.data.index(b"\n", self.at)
        line = self.data[self.at : end]
        self.at = end + 1
        return line.decode()

    def _since_mark(self) -> list[Any]:
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                self._refuse("a mark is missing")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def skip_protocol(self) -> None:
        version = self._take(1)[0]
        if version > pickle.HIGHEST_PROTOCOL:
            self._refuse(f"it is of protocol {version}")

    def skip_frame(self) -> None:
        self._take(8)

    def add_mark(self) -> None:
        self.stack.append(_MARK)

    def add_tuple(self) -> None:
        self.stack.append(tuple(self._since_mark()))

    def add_list(self) -> None:
        self.stack.append([])

    def add_dict(self) -> None:
        self.stack.append({})

    def append(self) -> None:
        item = self.stack.pop()
        self._list().append(item)

    def extend(self) -> None:
        items = self._since_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        target = self.stack[-1]
        if type(target) is UnknownGlobal:
            return []
        if type(target) is not list:
            self._refuse(f"it appends to a {type(target).__name__}")
        return target

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is UnknownGlobal:
            return
        if type(target) not in (dict, OrderedDict):
            self._refuse(f"it sets an item of a {type(target).__name__}")
        keys = items[::2]
        for key in keys:
            # Hashing what is nested without end would end the process.
            if type(key) not in self._keys and not (
                type(key) is tuple and all(type(part) in self._keys for part in key)
            ):
                self._refuse(f"a {type(key).__name__} is a key")
        target.update(zip(keys, items[1::2], strict=True))

    def add_global(self) -> None:
        module, name = self._line(), self._line()
        self._add_global((module, name))

    def add_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            self._refuse("it names something by what is no text")
        self._add_global((module, name))

    def _add_global(self, name: Name) -> None:
        if name not in self._globals:
            words = self._vocabulary
            if name in words.constants:
                self._globals[name] = words.constants[name]
            elif name in words.calls or name in words.classes:
                self._globals[name] = GlobalName(name)
            elif words.keeps_unknown:
                self._globals[name] = UnknownGlobal(name)
            else:
                raise UnknownNameError(f"it names {'.'.join(name)}, which has no place in it; it was not run")
        self.stack.append(self._globals[name])

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is UnknownGlobal:
            self.stack.append(function)
            return
        if type(function) is not GlobalName or function.name not in self._vocabulary.calls:
            self._refuse(f"it calls a {type(function).__name__}")
        if type(arguments) is not tuple:
            self._refuse("it calls without a tuple of arguments")
        self._add_instance(self._vocabulary.calls[function.name](*arguments))

    def instantiate(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if type(cls) is UnknownGlobal:
            self.stack.append(cls)
            return
        if type(cls) is not GlobalName or cls.name not in self._vocabulary.classes or arguments != ():
            self._refuse(f"it makes an instance of a {type(cls).__name__}")
        kind = self._vocabulary.classes[cls.name]
        self._add_instance(object.__new__(kind))

    def _add_instance(self, instance: object) -> None:
        if type(instance) in self._vocabulary.builds:
            self._open[id(instance)] = instance
        self.stack.append(instance)

    def build(self) -> None:
        state, instance = self.stack.pop(), self.stack.pop()
        if type(instance) is UnknownGlobal or type(instance) in self._vocabulary.attributes:
            self.stack.append(instance)
            return
        if self._open.pop(id(instance), None) is None:
            self._refuse(f"it gives a {type(instance).__name__} a state")
        made = self._vocabulary.builds[type(instance)](instance, state)
        if made is not instance:
            self._replaced[id(instance)] = (instance, made)
        self.stack.append(made)

    def add_persistent(self) -> None:
        if self._vocabulary.persistent is None:
            self._refuse("it refers to something outside")
        self.stack.append(self._vocabulary.persistent(self.stack.pop()))

    def keep_next(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def kept(self, place: int) -> Any:
        value = self.memo[place]
        if self._replaced:
            return self._replaced.get(id(value), (value, value))[1]
        return value

    def add_long(self, length: int) -> None:
        self.stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def add_text(self, length: int) -> None:
        self.stack.append(self._take(length).decode("utf-8", "surrogatepass"))

    def add_bytes(self, length: int) -> None:
        self.stack.append(self._take(length))

    def drop(self) -> None:
        self.stack.pop()

    def drop_to_mark(self) -> None:
        self._since_mark()


Method = Callable[[_Machine], None]
_U1, _U2, _U4, _U8 = (struct.Struct(f"<{kind}") for kind in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def _constant(value: object) -> Method:
    return lambda machine: machine.stack.append(value)


def _small_tuple(length: int) -> Method:
    def add(machine: _Machine) -> None:
        items = tuple(machine.stack[-length:])
        if len(items) < length:
            raise PickleRefusedError("it takes more from the stack than there is")
        machine.stack[-length:] = [items]

    return add


def _reading(form: struct.Struct, then: Callable[[_Machine, Any], None]) -> Method:
    """Reads a number, and does something with it. There are millions of these in large metadata."""
    unpack, size = form.unpack_from, form.size

    def read(machine: _Machine) -> None:
        at = machine.at
        (number,) = unpack(machine.data, at)
        machine.at = at + size
        then(machine, number)

    return read


def _add(machine: _Machine, number: float) -> None:
    machine.stack.append(number)


def _keep(machine: _Machine, place: int) -> None:
    machine.memo[place] = machine.stack[-1]


def _add_kept(machine: _Machine, place: int) -> None:
    machine.stack.append(machine.kept(place))


def _methods() -> dict[int, Method]:
    plain: dict[bytes, Method] = {
        pickle.PROTO: _Machine.skip_protocol,
        pickle.FRAME: _Machine.skip_frame,
        pickle.MARK: _Machine.add_mark,
        pickle.TUPLE: _Machine.add_tuple,
        pickle.EMPTY_LIST: _Machine.add_list,
        pickle.EMPTY_DICT: _Machine.add_dict,
        pickle.APPEND: _Machine.append,
        pickle.APPENDS: _Machine.extend,
        pickle.SETITEM: _Machine.set_item,
        pickle.SETITEMS: _Machine.set_items,
        pickle.GLOBAL: _Machine.add_global,
        pickle.STACK_GLOBAL: _Machine.add_stack_global,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.instantiate,
        pickle.BUILD: _Machine.build,
        pickle.BINPERSID: _Machine.add_persistent,
        pickle.MEMOIZE: _Machine.keep_next,
        pickle.POP: _Machine.drop,
        pickle.POP_MARK: _Machine.drop_to_mark,
        pickle.NONE: _constant(None),
        pickle.NEWTRUE: _constant(True),
        pickle.NEWFALSE: _constant(False),
        pickle.EMPTY_TUPLE: _constant(()),
        pickle.TUPLE1: _small_tuple(1),
        pickle.TUPLE2: _small_tuple(2),
        pickle.TUPLE3: _small_tuple(3),
    }
    reading: dict[bytes, tuple[struct.Struct, Callable[[_Machine, Any], None]]] = {
        pickle.BININT: (_I4, _add),
        pickle.BININT1: (_U1, _add),
        pickle.BININT2: (_U2, _add),
        pickle.BINFLOAT: (_F8, _add),
        pickle.LONG1: (_U1, _Machine.add_long),
        pickle.LONG4: (_I4, _Machine.add_long),
        pickle.SHORT_BINUNICODE: (_U1, _Machine.add_text),
        pickle.BINUNICODE: (_U4, _Machine.add_text),
        pickle.BINUNICODE8: (_U8, _Machine.add_text),
        pickle.SHORT_BINBYTES: (_U1, _Machine.add_bytes),
        pickle.BINBYTES: (_U4, _Machine.add_bytes),
        pickle.BINBYTES8: (_U8, _Machine.add_bytes),
        pickle.BINPUT: (_U1, _keep),
        pickle.LONG_BINPUT: (_U4, _keep),
        pickle.BINGET: (_U1, _add_kept),
        pickle.LONG_BINGET: (_U4, _add_kept),
    }
    methods = {code[0]: method for code, method in plain.items()}
    return methods | {code[0]: _reading(form, then) for code, (form, then) in reading.items()}


_METHODS: Final = _methods()
