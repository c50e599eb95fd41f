"""Pause Python's search for unreachable cycles while very many objects are made that all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause the cyclic garbage collector in a `with` block, or while a decorated function runs.

    It would look through all of the process's objects several times while a large state is planned. If it is
    off at the beginning, it stays off. Code that runs beside the training's loop doesn't call this: the training may
    switch it off meanwhile.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
