"""Test that random stories of a job end well: what can run runs, its attempt is open, and its costs are its own."""

import pytest
from operator_stories.properties import (
    PROPERTIES,
    check_next_failure,
    check_next_report,
    check_standstill,
)
from operator_stories.story import come_to_rest, tell

from stepkeeper_operator.api.v1alpha1.conditions import Phase

_STORIES = 50
_SHORT, _LONG = 100, 10_000


async def find_faults(seed: int) -> list[str]:
    """Tell the story of the seed, and find what is wrong with its end."""
    teller = await tell(seed)
    try:
        await come_to_rest(teller)
        faults = teller.faults + [
            f"{check.__name__}: {fault}" for check in PROPERTIES if (fault := check(teller)) is not None
        ]
        if writes := await teller.world.record_writes(rounds=3):
            faults.append(f"it writes at rest: {writes}")
        if not faults and teller.world.phase() is Phase.RUNNING:
            found = [
                await check(teller) for check in (check_next_report, check_standstill, check_next_failure)
            ]
            faults = [fault for fault in found if fault is not None]
    except AssertionError as error:
        faults = [str(error)]
    return [f"story {seed} ({' '.join(teller.told)}): {fault}; {teller.world.causes}" for fault in faults]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(seed, marks=[] if seed < _SHORT else pytest.mark.long)
        for seed in range(0, _LONG, _STORIES)
    ],
)
async def test_every_story_ends_well(first: int) -> None:
    faults = [fault for seed in range(first, first + _STORIES) for fault in await find_faults(seed)]
    assert not faults, "\n".join(faults)
