"""When a step is slow, by the steps before it; and what of all ranks' stacks a report has."""

import pytest

from stepkeeper.stacks.dumping import Pace, shorten_stacks


def paced(*finished_s: float) -> Pace:
    """Return the pace of steps 1, 2, 3 … which are finished at these times."""
    pace = Pace()
    for step, now_s in enumerate(finished_s, 1):
        pace = pace.see(step, now_s)
    return pace


@pytest.mark.parametrize(
    ("pace", "least_s", "slow_from_s"),
    [
        pytest.param(paced(), 1.0, None, id="no step"),
        pytest.param(paced(5.0), 1.0, None, id="one step"),
        pytest.param(paced(5.0, 6.0), 1.0, None, id="one step was timed"),
        pytest.param(paced(0.0, 2.0, 3.0, 4.0), 1.0, 24.0, id="ten times the longest before it"),
        pytest.param(paced(0.0, 2.0, 3.0), 300.0, 303.0, id="not before the least time"),
        pytest.param(paced(0.0, 1.0, 2.0).note(), 1.0, 22.0, id="noted: after twice the time"),
        pytest.param(paced(0.0, 1.0, 2.0).note().note(), 1.0, 42.0, id="noted twice: after four times"),
        pytest.param(paced(0.0, 1.0, 2.0).note().see(4, 3.0), 1.0, 13.0, id="noted, and a step after that"),
        pytest.param(paced(0.0, 1.0, 2.0).see(3, 99.0), 1.0, 12.0, id="the same step said again"),
        pytest.param(paced(0.0, 1.0, 2.0).see(None, 3.0), 1.0, None, id="between steps"),
        pytest.param(paced(0.0, 1.0, 2.0).see(None, 3.0).see(3, 500.0), 1.0, 510.0, id="and after that"),
    ],
)
def test_a_step_is_slow_from(pace: Pace, least_s: float, slow_from_s: float | None) -> None:
    assert pace.slow_from_s(least_s) == slow_from_s


def test_a_report_has_the_end_of_each_ranks_stacks() -> None:
    stacks = {rank: "x" * 5000 + f"\n  main of {rank}\n" for rank in (1, 0, 2)}
    text = shorten_stacks("nothing moves", stacks, 6000)
    assert len(text) <= 6000
    assert text.startswith("because nothing moves\nrank 0:\n")
    places = [text.index(f"main of {rank}\n") for rank in range(3)]
    assert places == sorted(places)
