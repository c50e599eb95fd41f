"""A process that restores nothing or a part, and saves: nothing that was there is deleted, and one warning says so."""

from typing import Any

import pytest
import torch

from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.trainer import open_manager


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "begins a new branch" in text]


@pytest.mark.parametrize(
    ("rules", "is_a_part"),
    [
        pytest.param(None, True, id="nothing"),
        pytest.param({}, False, id="all"),
        pytest.param({"items": ["w"]}, True, id="some items"),
        pytest.param({"exclude": ["moments"]}, True, id="all but some"),
        pytest.param({"strict": False}, True, id="all that a smaller state has"),
    ],
)
@pytest.mark.parametrize("by", ["latest", "step"])
def test_who_has_restored_a_part_goes_on_with_greater_steps_only(
    uri: str, caplog: pytest.LogCaptureFixture, rules: dict[str, Any] | None, is_a_part: bool, by: str
) -> None:
    """The rest of what was saved is nowhere else than in the commits that were there."""

    def state() -> dict[str, Any]:
        return {"w": torch.zeros(4), "moments": torch.zeros(4)}

    with open_manager(uri, keep=2) as manager:
        for step in (99_000, 100_000):
            manager.save(step, state()).result()
    with open_manager(uri, keep=2) as manager:
        if rules is not None:
            own = {"w": torch.zeros(4)} if "strict" in rules else state()
            manager.restore(own, *([100_000] if by == "step" else []), **rules)
        manager.save(100_001, state()).result()
        assert not warned(caplog)
        for step in (1, 2, 3):
            manager.save(step, state()).result()
    assert open_manager(uri).steps() == [2, 3]
    assert len(warned(caplog)) == is_a_part
    assert all("call restore(state) with this whole state before" in text for text in warned(caplog))
    assert sorted(record.step for record in Log(open_store(uri)).open().live) == [
        2,
        3,
        *([100_000, 100_001] if is_a_part else []),
    ]
