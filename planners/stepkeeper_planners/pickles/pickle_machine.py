"""Carry out a pickle's opcodes on a stack and a memo, without running anything that the pickle names."""

import pickle
from collections import OrderedDict
from typing import Any, Final, NoReturn, final

from stepkeeper_planners.errors import PickleRefusedError, UnknownNameError
from stepkeeper_planners.pickles.vocabulary import GlobalName, Name, UnknownGlobal, Vocabulary

__all__ = ["PickleMachine"]

_KEY_TYPES: Final = frozenset({str, int, bool, float, complex, bytes, type(None)})
_MARK: Final = object()


@final
class PickleMachine:
    """Keep the stack and the memo of one pickle while it is read."""

    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self.data = data
        self.position = 0
        self._vocabulary = vocabulary
        self._keys = _KEY_TYPES | vocabulary.key_types
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._globals: dict[Name, object] = {}
        self.unbuilt: dict[int, object] = {}
        """Instances that have no state yet, by id."""
        self._replaced: dict[int, tuple[object, object]] = {}
        """Instances that were replaced by another object. Both stay alive: an id must not be used again."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise PickleRefusedError with this reason and the position in the pickle."""
        raise PickleRefusedError(f"{reason} (byte {self.position})")

    def _take(self, n_bytes: int) -> bytes:
        end = self.position + n_bytes
        if n_bytes < 0 or end > len(self.data):
            self.refuse("it ends too early")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _line(self) -> str:
        end = self.data.index(b"\n", self.position)
        line = self.data[self.position : end]
        self.position = end + 1
        return line.decode()

    def _since_mark(self) -> list[Any]:
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                self.refuse("a mark is missing")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def skip_protocol(self) -> None:
        version = self._take(1)[0]
        if version > pickle.HIGHEST_PROTOCOL:
            self.refuse(f"it is of protocol {version}")

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
            self.refuse(f"it appends to a {type(target).__name__}")
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
            self.refuse(f"it sets an item of a {type(target).__name__}")
        keys = items[::2]
        for key in keys:
            # Hashing an endlessly nested key would crash the process.
            if type(key) not in self._keys and not (
                type(key) is tuple and all(type(part) in self._keys for part in key)
            ):
                self.refuse(f"a {type(key).__name__} is a key")
        target.update(zip(keys, items[1::2], strict=True))

    def add_global(self) -> None:
        module, name = self._line(), self._line()
        self._add_global((module, name))

    def add_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            self.refuse("it names something by what is no text")
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
            self.refuse(f"it calls a {type(function).__name__}")
        if type(arguments) is not tuple:
            self.refuse("it calls without a tuple of arguments")
        self._add_instance(self._vocabulary.calls[function.name](*arguments))

    def instantiate(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if type(cls) is UnknownGlobal:
            self.stack.append(cls)
            return
        if type(cls) is not GlobalName or cls.name not in self._vocabulary.classes or arguments != ():
            self.refuse(f"it makes an instance of a {type(cls).__name__}")
        kind = self._vocabulary.classes[cls.name]
        self._add_instance(object.__new__(kind))

    def _add_instance(self, instance: object) -> None:
        if type(instance) in self._vocabulary.builds:
            self.unbuilt[id(instance)] = instance
        self.stack.append(instance)

    def build(self) -> None:
        state, instance = self.stack.pop(), self.stack.pop()
        if type(instance) is UnknownGlobal or type(instance) in self._vocabulary.attributes:
            self.stack.append(instance)
            return
        if self.unbuilt.pop(id(instance), None) is None:
            self.refuse(f"it gives a {type(instance).__name__} a state")
        made = self._vocabulary.builds[type(instance)](instance, state)
        if made is not instance:
            self._replaced[id(instance)] = (instance, made)
        self.stack.append(made)

    def add_persistent(self) -> None:
        if self._vocabulary.persistent is None:
            self.refuse("it refers to something outside")
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
