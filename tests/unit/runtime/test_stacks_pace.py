"""When a step is slow, by the steps before it; and what of all ranks' stacks a report has."""

import pytest

from stepkeeper.stacks.dumping import Pace, shorten_stacks


def paced(*finished_s: float) -> Pace:
    """Return the pace of steps 1, 2, 3 … which are finished at these times."""
    pace = Pace()
    for step, now_s in enumerate(finished_s, 1):
        pace = pace.see(step, now_s)
    return pace


@pytest.mark.parametrize("finished_s", [(), (5.0,), (5.0, 6.0)])
def test_before_two_steps_were_timed_none_is_slow(finished_s: tuple[float, ...]) -> None:
    assert paced(*finished_s).slow_from_s(1.0) is None


def test_a_step_is_slow_from_ten_times_the_longest_before_it() -> None:
    assert paced(0.0, 2.0, 3.0, 4.0).slow_from_s(1.0) == 4.0 + 20.0


def test_no_step_is_slow_before_the_least_time() -> None:
    assert paced(0.0, 2.0, 3.0).slow_from_s(300.0) == 303.0


def test_a_step_that_was_noted_is_slow_again_after_twice_the_time() -> None:
    pace = paced(0.0, 1.0, 2.0)
    assert [pace.slow_from_s(1.0), pace.note().slow_from_s(1.0), pace.note().note().slow_from_s(1.0)] == [
        12,
        22,
        42,
    ]
    assert pace.note().see(4, 3.0).slow_from_s(1.0) == 13.0


def test_the_same_step_told_again_changes_nothing() -> None:
    pace = paced(0.0, 1.0, 2.0)
    assert pace.see(3, 99.0) is pace


def test_what_comes_between_steps_is_no_step() -> None:
    pace = paced(0.0, 1.0, 2.0).see(None, 3.0)
    assert pace.slow_from_s(1.0) is None
    assert pace.see(3, 500.0).slow_from_s(1.0) == 510.0


def test_a_report_has_the_end_of_each_ranks_stacks() -> None:
    stacks = {rank: "x" * 5000 + f"\n  main of {rank}\n" for rank in (1, 0, 2)}
    text = shorten_stacks("nothing moves", stacks, 6000)
    assert len(text) <= 6000
    assert text.startswith("because nothing moves\nrank 0:\n")
    assert [text.index(f"main of {rank}\n") for rank in range(3)] == sorted(
        text.index(f"main of {rank}\n") for rank in range(3)
    )


def test_of_many_ranks_a_report_has_the_first_that_have_room() -> None:
    text = shorten_stacks("nothing moves", dict.fromkeys(range(100), "y" * 2000), 6000)
    assert len(text) <= 6000
    assert "rank 4:\n" in text
    assert "rank 9:\n" not in text


def test_short_stacks_are_kept_whole() -> None:
    assert shorten_stacks("asked", {0: "a\n", 1: "b\n"}) == "because asked\nrank 0:\na\nrank 1:\nb\n"
