"""The end of a manager takes no longer than it may, however long each of its parts makes use of its share."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import ExitCode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.save.saver import Saver
from stepkeeper.training import closing
from stepkeeper.training.closing import Closing
from stepkeeper.training.step_controller import StepController


class Clock:
    """Advances by what each part is given, which uses all of it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.given: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def use(self, *given: Any) -> None:
        self.given.append(given[-1])
        self.now_s += max(0.0, given[-1])


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER_LOST, 1])
@pytest.mark.parametrize("limit_s", [9.0, 4.0, 0.9, 0.0])
def test_all_parts_together_end_in_the_time_of_one_deadline(
    monkeypatch: pytest.MonkeyPatch, code: int, limit_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(closing, "time", clock)
    parts = Closing(
        cast(
            StepController,
            SimpleNamespace(close=clock.use, process_exit=SimpleNamespace(is_pods=False)),
        ),
        cast(
            Saver,
            SimpleNamespace(
                close=clock.use, await_hooks=clock.use, on_fence=lambda _tell, *, is_pods: is_pods
            ),
        ),
        cast(Progress, SimpleNamespace(send_latest_step=list)),
        cast(Companion, SimpleNamespace(close=clock.use)),
        cast(RankGroup, SimpleNamespace(announce_leave=clock.use, abort=list, leave=clock.use)),
    )
    parts._close_parts(code, None, clock.now_s + limit_s)
    assert clock.now_s <= 100.0 + limit_s + 1e-6
    assert all(given >= 0 for given in clock.given)
    if limit_s:
        assert all(given > 0 for given in clock.given[:4]), "each of these has something to do"
