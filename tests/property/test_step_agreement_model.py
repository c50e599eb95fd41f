"""In every order of what ranks and their threads do, all act on a wish after the same step, and none is stuck."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from agreement_model.explore import FoundError, explore
from agreement_model.world import Setting

from stepkeeper.coordination.agreement_rules import Agreed, Position, RankView

STOPS = ((0, "stop"), (1, "stop"))
ASKED = (0, "stop/asked")
SETTINGS = [
    pytest.param(Setting(steps=(0, 1, 2), wishes=((1, "stop"),)), id="one-notice"),
    pytest.param(Setting(steps=(3, 10, 11), wishes=((1, "stop"), (1, "save/a"))), id="a-notice-and-a-save"),
    pytest.param(Setting(steps=(1, 2), wishes=(*STOPS, (0, "save/a"))), id="notices-in-both"),
    pytest.param(Setting(steps=(7,), wishes=((0, "save/a"), (1, "stop"))), id="the-only-step"),
    pytest.param(Setting(steps=(), wishes=((0, "stop"),)), id="no-step"),
    pytest.param(Setting(steps=(8, 9, 3, 4), wishes=((1, "stop"), (0, "save/a")), lead=1), id="going-back"),
    pytest.param(Setting(steps=(5, 2, 1), wishes=((1, "stop"),)), id="going-back-twice-far-apart"),
    pytest.param(
        Setting(steps=(1, 2, 3), wishes=(*STOPS, (1, "save/a")), lead=1), id="a-collective-in-each-step"
    ),
    pytest.param(
        Setting(steps=(1, 2, 3), wishes=((0, "stop"), (1, "save/a")), heeds_stop=False), id="unheeded"
    ),
    pytest.param(Setting(steps=(1, 2), wishes=((0, "stop"), (1, "save/a")), deaths=1), id="a-rank-is-lost"),
    pytest.param(Setting(steps=(1, 2), wishes=((2, "stop"),), n_ranks=3, lead=1), id="three-ranks"),
    pytest.param(Setting(steps=(1, 2), wishes=STOPS, starts_apart=True), id="before-all-have-started"),
    pytest.param(
        Setting(steps=(1, 2), wishes=STOPS, starts_apart=True, meets=(0,), deaths=1), id="in-a-restore"
    ),
    pytest.param(
        Setting(steps=(1, 2, 3), wishes=(*STOPS, (1, "save/a")), meets=(1, 2)), id="in-saves-of-all"
    ),
    pytest.param(Setting(steps=(1, 2, 3), wishes=(ASKED, (1, "save/a"))), id="a-stop-that-is-asked-for"),
    pytest.param(Setting(steps=(1, 2, 3), wishes=(ASKED, (1, "stop"))), id="asked-for-and-told"),
    pytest.param(
        Setting(steps=(8, 9, 3), wishes=(ASKED, (1, "stop")), lead=1), id="asked-for-and-told-and-going-back"
    ),
    pytest.param(
        Setting(steps=(1, 2, 3), wishes=(ASKED, (1, "stop")), heeds_stop=False), id="asked-for-and-unheeded"
    ),
    pytest.param(
        Setting(steps=(1, 2), wishes=(ASKED, (1, "stop")), starts_apart=True, deaths=1),
        id="asked-for-and-a-rank-is-lost",
    ),
]
LONG = [
    pytest.param(Setting(steps=(1, 2, 5), wishes=(*STOPS, (0, "save/a"), (1, "save/b"))), id="four-wishes"),
    pytest.param(
        Setting(steps=(1, 2, 3), wishes=(*STOPS, (2, "stop")), n_ranks=3, lead=1), id="three-notices"
    ),
    pytest.param(
        Setting(steps=(1, 2), wishes=((0, "stop"), (2, "save/a")), n_ranks=3, deaths=1), id="three-and-a-loss"
    ),
    pytest.param(Setting(steps=(1, 2), wishes=((0, "stop"), (2, "save/a")), n_ranks=3), id="three-far-apart"),
    pytest.param(
        Setting(steps=(1, 2), wishes=((1, "stop"),), n_ranks=3, starts_apart=True, meets=(0, 1), lead=1),
        id="three-in-a-restore",
    ),
    pytest.param(
        Setting(
            steps=(1, 2), wishes=(*STOPS[:1], (2, "stop")), n_ranks=3, starts_apart=True, meets=(0,), deaths=1
        ),
        id="three-start-apart-and-a-loss",
    ),
    pytest.param(
        Setting(steps=(1, 2), wishes=((1, "stop"),), n_ranks=3, starts_apart=True, deaths=2),
        id="three-start-apart-and-two-losses",
    ),
    pytest.param(
        Setting(steps=(1, 2), wishes=(ASKED, (1, "stop/asked"), (2, "stop")), n_ranks=3, lead=1),
        id="three-asked-and-told",
    ),
    pytest.param(
        Setting(steps=(1, 2), wishes=(ASKED, (2, "stop")), n_ranks=3, deaths=1),
        id="three-asked-and-told-and-a-loss",
    ),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ranks_act_after_the_same_steps_and_none_is_stuck(setting: Setting) -> None:
    found = explore(setting)
    print(found)
    assert found.ends
    assert found.finished, "a notice may come too late"
    if len(setting.steps) > 1:
        assert found.stopped, "and in time"
    assert bool(found.gave_up) == bool(setting.deaths)


@pytest.mark.long
@pytest.mark.parametrize("setting", LONG)
def test_more_ranks_and_more_wishes(setting: Setting) -> None:
    found = explore(setting)
    print(found)
    assert found.stopped
    assert found.finished
    assert bool(found.gave_up) == bool(setting.deaths)


def by_rank_0_alone(view: RankView, passed: tuple[Position, ...]) -> RankView:
    return HEAR_ANSWERS(view, passed[:1])


def forgetting_what_came_before(view: RankView, beyond: Position) -> RankView:
    heard = HEAR_CONCLUSION(view, beyond)
    return replace(heard, agreed=(Agreed(view.name, beyond),))


def with_its_own_wishes(view: RankView, beyond: Position) -> RankView:
    return replace(HEAR_CONCLUSION(view, beyond), wishes=())


def from_its_own_step(view: RankView, step: int) -> tuple[RankView, tuple[str, ...]]:
    after, _ = PASS_STEP(view, step)
    return replace(after, agreed=()), tuple(agreed.name for agreed in view.agreed)


def by_its_number_alone(view: RankView, step: int) -> tuple[RankView, tuple[str, ...]]:
    return PASS_STEP(replace(view, passed=Position(0, -1)), step)


HEAR_ANSWERS = RankView.hear_answers
HEAR_CONCLUSION = RankView.hear_conclusion
PASS_STEP = RankView.pass_step


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("hear_answers", by_rank_0_alone),
        ("hear_conclusion", forgetting_what_came_before),
        ("hear_conclusion", with_its_own_wishes),
        ("pass_step", from_its_own_step),
        ("pass_step", by_its_number_alone),
        ("is_held", property(lambda _: False)),
    ],
)
def test_each_rule_is_needed(
    name: str, mutant: Callable[..., Any] | property, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankView, name, mutant)
    with pytest.raises(FoundError):
        explore(Setting(steps=(2, 3, 1), wishes=((1, "stop"), (1, "save/a"), (0, "save/b"))))


def test_a_stop_that_kills_counts_beside_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agreement_model.explore.kills_for", lambda stops: "stop/asked" not in stops)
    with pytest.raises(FoundError, match="nobody is killed for"):
        explore(Setting(steps=(1, 2), wishes=(ASKED, (1, "stop"))))
