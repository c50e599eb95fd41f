"""Python imports this when an interpreter starts that has this folder on its path: tests, ranks and companions.

`SABOTAGE` names a mechanism. As soon as the module of its symbol is imported, the symbol is replaced.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from mechanisms import MECHANISMS, Mechanism
from typing_extensions import override


class Saboteur(MetaPathFinder):
    def __init__(self, mechanism: Mechanism, log: Path) -> None:
        self._mechanism, self._log = mechanism, log

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mechanism.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_take_out(module: ModuleType) -> None:
                exec_module(module)
                self._take_out(module)

            spec.loader.exec_module = exec_and_take_out  # type: ignore[method-assign]  # that is the point
        return spec

    def _take_out(self, module: ModuleType) -> None:
        outcome = "failed"
        try:
            owner, name = self._mechanism.find_owner(module)
            setattr(owner, name, self._mechanism.instead(vars(owner)[name]))
            outcome = "taken out"
        finally:
            with self._log.open("a") as log:
                log.write(f"{outcome} in {os.getpid()}\n")


if "SABOTAGE" in os.environ:
    sys.meta_path.insert(0, Saboteur(MECHANISMS[os.environ["SABOTAGE"]], Path(os.environ["SABOTAGE_LOG"])))
