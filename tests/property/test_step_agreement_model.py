"""In every order of what ranks and their threads do, all act on a wish after the same step, and none is stuck."""

import pytest
from agreement_model.explore import explore
from agreement_model.world import Setting

STOPS = ((0, "stop"), (1, "stop"))
SAVE = (1, "save/a")
ASKED = (0, "stop/asked")
ASKED_AND_TOLD = (ASKED, (1, "stop"))
SETTINGS = {
    "one-notice": Setting(steps=(0, 1, 2), wishes=((1, "stop"),)),
    "a-notice-and-a-save": Setting(steps=(3, 10, 11), wishes=((1, "stop"), SAVE)),
    "notices-in-both": Setting(steps=(1, 2), wishes=(*STOPS, (0, "save/a"))),
    "the-only-step": Setting(steps=(7,), wishes=((0, "save/a"), (1, "stop"))),
    "no-step": Setting(steps=(), wishes=((0, "stop"),)),
    "going-back": Setting(steps=(8, 9, 3, 4), wishes=((1, "stop"), (0, "save/a")), lead=1),
    "going-back-twice-far-apart": Setting(steps=(5, 2, 1), wishes=((1, "stop"),)),
    "a-collective-in-each-step": Setting(steps=(1, 2, 3), wishes=(*STOPS, SAVE), lead=1),
    "unheeded": Setting(steps=(1, 2, 3), wishes=((0, "stop"), SAVE), respects_stop=False),
    "a-rank-is-lost": Setting(steps=(1, 2), wishes=((0, "stop"), SAVE), deaths=1),
    "three-ranks": Setting(steps=(1, 2), wishes=((2, "stop"),), n_ranks=3, lead=1),
    "before-all-have-started": Setting(steps=(1, 2), wishes=STOPS, starts_apart=True),
    "in-a-restore": Setting(steps=(1, 2), wishes=STOPS, starts_apart=True, meets=(0,), deaths=1),
    "in-saves-of-all": Setting(steps=(1, 2, 3), wishes=(*STOPS, SAVE), meets=(1, 2)),
    "a-stop-that-is-asked-for": Setting(steps=(1, 2, 3), wishes=(ASKED, SAVE)),
    "asked-for-and-told-and-going-back": Setting(steps=(8, 9, 3), wishes=ASKED_AND_TOLD, lead=1),
    "asked-for-and-unheeded": Setting(steps=(1, 2, 3), wishes=ASKED_AND_TOLD, respects_stop=False),
    "a-skip": Setting(steps=(1, 2), wishes=((1, "stop"), SAVE), saves_at_stop=False),
    "a-skip-and-a-rank-is-lost": Setting(steps=(1, 2), wishes=STOPS, saves_at_stop=False, deaths=1),
    "programs-that-end-themselves": Setting(
        steps=(1, 2), wishes=STOPS, ends_itself=True, respects_stop=False
    ),
    "a-stop-save-that-fails-once": Setting(steps=(1, 2), wishes=((1, "stop"),), failures=1),
    "a-stop-save-that-fails-again": Setting(steps=(1, 2), wishes=((1, "stop"),), lead=1, failures=4),
    "nothing-to-save-at-the-end": Setting(steps=(1, 2), wishes=((1, "stop"),), is_last_unsaved=False),
    "asked-for-and-a-rank-is-lost": Setting(steps=(1, 2), wishes=ASKED_AND_TOLD, starts_apart=True, deaths=1),
}
WHOLE = [pytest.mark.long, pytest.mark.timeout(3600)]
LONG = {
    "going-back-with-three-wishes": Setting(steps=(2, 3, 1), wishes=((1, "stop"), SAVE, (0, "save/b"))),
    "four-wishes": Setting(steps=(1, 2, 5), wishes=(*STOPS, (0, "save/a"), (1, "save/b"))),
    "three-notices": Setting(steps=(1, 2, 3), wishes=(*STOPS, (2, "stop")), n_ranks=3, lead=1),
    "three-far-apart": Setting(steps=(1, 2), wishes=((0, "stop"), (2, "save/a")), n_ranks=3),
    "three-and-a-loss": Setting(steps=(1, 2), wishes=((0, "stop"),), n_ranks=3, deaths=1),
    "three-in-a-restore": Setting(
        steps=(1, 2), wishes=((1, "stop"),), n_ranks=3, starts_apart=True, meets=(0, 1), lead=1
    ),
    "three-start-apart-and-two-losses": Setting(
        steps=(1, 2), wishes=((1, "stop"),), n_ranks=3, starts_apart=True, deaths=2
    ),
    "three-asked-and-told": Setting(steps=(1, 2), wishes=(ASKED, (2, "stop")), n_ranks=3),
}


@pytest.mark.parametrize(
    "setting",
    [
        *(pytest.param(setting, id=name) for name, setting in SETTINGS.items()),
        *(pytest.param(setting, id=name, marks=WHOLE) for name, setting in LONG.items()),
    ],
)
def test_all_ranks_act_after_the_same_steps_and_none_is_stuck(setting: Setting) -> None:
    found = explore(setting)
    print(found)
    assert found.ends
    assert found.finished, "a notice may come too late"
    if len(setting.steps) > 1:
        assert found.stopped, "and in time"
    assert bool(found.gave_up) == bool(setting.deaths)
