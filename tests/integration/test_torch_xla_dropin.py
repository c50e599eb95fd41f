"""One import is changed, and the same code sees the same: attributes, plans, data, subclasses, what is restored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
