"""Hooks of a store in memory: something happens, or goes wrong, around an operation."""

import math
import threading
from collections.abc import Callable
from typing import Literal

from stepkeeper_testing.memory import FaultHook, Operation


def at(
    when: str, effect: Exception | Callable[[], object], *, path: str = "", times: float = math.inf
) -> FaultHook:
    """Make a hook that raises an error, or calls something, at `when`: "before read", "after put_if_absent".

    It does so the first so many times, for paths with `path` in them.
    """
    left = times
    counting = threading.Lock()

    def hook(moment: Literal["before", "after"], operation: Operation, asked: str) -> None:
        nonlocal left
        if f"{moment} {operation}" != when or path not in asked:
            return
        with counting:
            if left <= 0:
                return
            left -= 1
        if isinstance(effect, Exception):
            raise effect
        effect()

    return hook
