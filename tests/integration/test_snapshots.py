"""Snapshots hold the state as it was, whatever becomes of it at once; and nothing is compiled twice for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "snapshots"
Said = Callable[..., dict[str, Any]]


@pytest.fixture
def said_by(run_on_devices: Callable[..., str]) -> Said:
    def run(script: str, *arguments: object, **options: Any) -> dict[str, Any]:
        return dict(json.loads(run_on_devices(FOLDER / script, *arguments, **options).splitlines()[-1]))

    return run


def test_sharded_tensors_are_saved_as_they_were_at_any_device_budget(said_by: Said, tmp_path: Path) -> None:
    said = said_by("intact_xla.py", tmp_path)
    for budget, found in said.items():
        assert found["wrong"] == [], budget
        assert found["tensors"] > 30
    copied, moved = "copied there", "moved while waiting"
    assert {budget: found["ways"] for budget, found in said.items()} == {
        "all": [copied],
        "half": [copied, moved],
        "none": [moved],
        "all, before the loop's own sync": [copied],
        "learned": [copied, moved],
    }


@pytest.mark.smoke
def test_saves_disturb_nothing_and_a_restored_training_goes_on_bit_by_bit(
    said_by: Said, max_isa: str, tmp_path: Path
) -> None:
    uri = (tmp_path / "root").as_uri()
    saved = said_by("going_on.py", "save", uri, max_isa=max_isa)
    assert saved["same"], "random numbers and arithmetic are those of a training that never saves"
    assert saved["later_compilations"] == 0, "neither a step nor a snapshot is compiled again"
    restored = said_by("going_on.py", "restore", uri, max_isa=max_isa)
    assert restored["step"] == 5
    assert restored["bits"] == saved["bits"]
    assert "devices=[2,2]" in restored["spec"]


def test_one_small_program_is_compiled_for_all_saves_and_ahead_of_the_first(
    said_by: Said, tmp_path: Path
) -> None:
    counts = said_by("compiling.py", tmp_path, timeout_s=560)
    assert counts["with"] == counts["without"] + 1
    assert counts["for a notice"] == 0
