"""Read a pickle without running it. Names in it stay names, and a vocabulary says what each of them may make.

Only bytes that are in memory are looked at and kept: no memory is allocated for a length that a pickle claims.
"""

import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.pickle_machine import PickleMachine
from stepkeeper_planners.pickles.vocabulary import Vocabulary

__all__ = ["unpickle"]

# The makers and Python's own containers raise these on nonsense.
_NONSENSE: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)


def unpickle(data: bytes, vocabulary: Vocabulary) -> object:
    """Read the object that the pickle holds.

    Args:
        data: the pickle.
        vocabulary: what it may name.

    Raises:
        PickleRefusedError: it names something else, needs an opcode that data has no use for, or is damaged.
    """
    machine = PickleMachine(data, vocabulary)
    try:
        return _run(machine)
    except PickleRefusedError:
        raise
    except _NONSENSE as error:
        if machine.position >= len(data):
            raise PickleRefusedError("it ends too early") from error
        raise PickleRefusedError(f"it is damaged ({type(error).__name__}: {error})") from error


def _run(machine: PickleMachine) -> object:
    methods, data, stop = _METHODS, machine.data, pickle.STOP[0]
    while True:
        if machine.position >= len(data):
            machine.refuse("it ends too early")
        code = data[machine.position]
        machine.position += 1
        if code == stop:
            break
        method = methods.get(code)
        if method is None:
            machine.refuse(f"it has opcode {bytes([code])!r}, which data has no use for")
        method(machine)
    if machine.unbuilt:
        kinds = sorted({type(instance).__name__ for instance in machine.unbuilt.values()})
        machine.refuse(f"it holds a {kinds[0]} without a state")
    (result,) = machine.stack
    return result


Method = Callable[[PickleMachine], None]
_U1, _U2, _U4, _U8 = (struct.Struct(f"<{kind}") for kind in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def _constant(value: object) -> Method:
    return lambda machine: machine.stack.append(value)


def _small_tuple(length: int) -> Method:
    def add(machine: PickleMachine) -> None:
        items = tuple(machine.stack[-length:])
        if len(items) < length:
            raise PickleRefusedError("it takes more from the stack than there is")
        machine.stack[-length:] = [items]

    return add


def _reading(form: struct.Struct, then: Callable[[PickleMachine, Any], None]) -> Method:
    """Return a method that reads a number and passes it to `then`. Large metadata holds millions of these."""
    unpack, size = form.unpack_from, form.size

    def read(machine: PickleMachine) -> None:
        position = machine.position
        (number,) = unpack(machine.data, position)
        machine.position = position + size
        then(machine, number)

    return read


def _add(machine: PickleMachine, number: float) -> None:
    machine.stack.append(number)


def _keep(machine: PickleMachine, place: int) -> None:
    machine.memo[place] = machine.stack[-1]


def _add_kept(machine: PickleMachine, place: int) -> None:
    machine.stack.append(machine.kept(place))


def _methods() -> dict[int, Method]:
    plain: dict[bytes, Method] = {
        pickle.PROTO: PickleMachine.skip_protocol,
        pickle.FRAME: PickleMachine.skip_frame,
        pickle.MARK: PickleMachine.add_mark,
        pickle.TUPLE: PickleMachine.add_tuple,
        pickle.EMPTY_LIST: PickleMachine.add_list,
        pickle.EMPTY_DICT: PickleMachine.add_dict,
        pickle.APPEND: PickleMachine.append,
        pickle.APPENDS: PickleMachine.extend,
        pickle.SETITEM: PickleMachine.set_item,
        pickle.SETITEMS: PickleMachine.set_items,
        pickle.GLOBAL: PickleMachine.add_global,
        pickle.STACK_GLOBAL: PickleMachine.add_stack_global,
        pickle.REDUCE: PickleMachine.call,
        pickle.NEWOBJ: PickleMachine.instantiate,
        pickle.BUILD: PickleMachine.build,
        pickle.BINPERSID: PickleMachine.add_persistent,
        pickle.MEMOIZE: PickleMachine.keep_next,
        pickle.POP: PickleMachine.drop,
        pickle.POP_MARK: PickleMachine.drop_to_mark,
        pickle.NONE: _constant(None),
        pickle.NEWTRUE: _constant(True),
        pickle.NEWFALSE: _constant(False),
        pickle.EMPTY_TUPLE: _constant(()),
        pickle.TUPLE1: _small_tuple(1),
        pickle.TUPLE2: _small_tuple(2),
        pickle.TUPLE3: _small_tuple(3),
    }
    reading: dict[bytes, tuple[struct.Struct, Callable[[PickleMachine, Any], None]]] = {
        pickle.BININT: (_I4, _add),
        pickle.BININT1: (_U1, _add),
        pickle.BININT2: (_U2, _add),
        pickle.BINFLOAT: (_F8, _add),
        pickle.LONG1: (_U1, PickleMachine.add_long),
        pickle.LONG4: (_I4, PickleMachine.add_long),
        pickle.SHORT_BINUNICODE: (_U1, PickleMachine.add_text),
        pickle.BINUNICODE: (_U4, PickleMachine.add_text),
        pickle.BINUNICODE8: (_U8, PickleMachine.add_text),
        pickle.SHORT_BINBYTES: (_U1, PickleMachine.add_bytes),
        pickle.BINBYTES: (_U4, PickleMachine.add_bytes),
        pickle.BINBYTES8: (_U8, PickleMachine.add_bytes),
        pickle.BINPUT: (_U1, _keep),
        pickle.LONG_BINPUT: (_U4, _keep),
        pickle.BINGET: (_U1, _add_kept),
        pickle.LONG_BINGET: (_U4, _add_kept),
    }
    methods = {code[0]: method for code, method in plain.items()}
    return methods | {code[0]: _reading(form, then) for code, (form, then) in reading.items()}


_METHODS: Final = _methods()
