"""One import is changed, and the same code sees the same: attributes, plans, data, subclasses, what is restored."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stepkeeper

SCRIPT = Path(__file__).parent / "torch_xla_dropin" / "user.py"
THEIRS = "torch_xla.experimental.distributed_checkpoint"


def test_same_code_sees_the_same(run_on_devices: Callable[..., str], tmp_path: Path) -> None:
    def seen_with(module: str, folder: Path) -> Any:
        folder.mkdir()
        run_on_devices(SCRIPT, module, folder)
        return json.loads((folder / "seen.json").read_text())

    ours = seen_with("stepkeeper", tmp_path / "ours")
    theirs = seen_with(THEIRS, tmp_path / "theirs")
    assert len(ours["by hand"]["items"]) > 10
    assert len(ours["through subclasses"]["asked by the reader"]) > 20
    for part, seen in theirs.items():
        if isinstance(seen, dict):
            for name in seen:
                assert ours[part][name] == seen[name], f"{part}: {name}"
        assert ours[part] == seen, part


def test_constructors_take_no_arguments_if_need_be() -> None:
    for name in ("SPMDSavePlanner", "SPMDLoadPlanner"):
        parameters = inspect.signature(getattr(stepkeeper, name)).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters), name
    assert list(inspect.signature(stepkeeper.prime_optimizer).parameters) == ["optimizer"]
