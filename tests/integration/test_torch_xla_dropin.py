"""One import is changed, and the same code sees the same: attributes, plans, data, subclasses, what is restored."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepkeeper

SCRIPTS = Path(__file__).parent / "torch_xla_dropin"
THEIRS = "torch_xla.experimental.distributed_checkpoint"


@pytest.fixture
def seen_with_both(run_on_devices: Callable[..., str], tmp_path: Path) -> Callable[[str], tuple[Any, Any]]:
    """seen_with_both(script): what it has seen with our library, and with torch_xla's."""

    def seen_with(script: str, module: str, folder: Path) -> Any:
        folder.mkdir()
        run_on_devices(SCRIPTS / script, module, folder)
        return json.loads((folder / "seen.json").read_text())

    return lambda script: (
        seen_with(script, "stepkeeper", tmp_path / "ours"),
        seen_with(script, THEIRS, tmp_path / "theirs"),
    )


def test_same_code_sees_the_same(seen_with_both: Callable[[str], tuple[Any, Any]]) -> None:
    ours, theirs = seen_with_both("user.py")
    assert len(ours["by hand"]["items"]) > 10
    assert len(ours["through subclasses"]["asked by the reader"]) > 20
    for part, seen in theirs.items():
        if isinstance(seen, dict):
            for name in seen:
                assert ours[part][name] == seen[name], f"{part}: {name}"
        assert ours[part] == seen, part


def test_tensors_are_moved_alike_item_by_item(seen_with_both: Callable[[str], tuple[Any, Any]]) -> None:
    ours, theirs = seen_with_both("moving.py")
    assert theirs["read"] == {"changed before": False, "elements": 128, "all": True}
    assert ours == theirs


def test_constructors_take_no_arguments_if_need_be() -> None:
    for name in ("SPMDSavePlanner", "SPMDLoadPlanner"):
        parameters = inspect.signature(getattr(stepkeeper, name)).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters), name
    assert list(inspect.signature(stepkeeper.prime_optimizer).parameters) == ["optimizer"]
