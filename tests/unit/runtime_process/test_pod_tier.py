"""Test what a job's manager is constructed with: by the job, by its template, and by the training code."""

from pathlib import Path
from typing import Any

import pytest

from stepkeeper import CheckpointManager
from stepkeeper.contract import SETTINGS_FILE_NAME, Interval, Settings
from stepkeeper.policy import keep, save
from stepkeeper.policy.save import SavePolicy
from stepkeeper.training import environment as env
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodPaths:
    for name, value in pod_environ(pod_identity()).items():
        monkeypatch.setenv(name, value)
    settings = Settings(uri="gs://bucket/run", interval=Interval(steps=1))
    (tmp_path / SETTINGS_FILE_NAME).write_bytes(settings.to_json())
    return PodPaths(settings_folder=tmp_path, local_tier_folder=tmp_path / "volume")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that a manager is constructed with, without constructing it."""
    found: dict[str, Any] = {}

    def note(_: CheckpointManager, __: str, policy: SavePolicy, **given: object) -> None:
        found.update(given, policy=policy)

    monkeypatch.setattr(CheckpointManager, "__init__", note)
    return found


def test_the_code_adds_to_what_the_job_says(places: PodPaths, options: dict[str, Any]) -> None:
    CheckpointManager.from_env(
        places=places, also_save=save.AtSteps((250,)), also_keep=keep.BestN(2, "loss", "min")
    )
    assert options["policy"] == save.AnyOf((save.EveryNSteps(1), save.AtSteps((250,))))
    assert options["keep"] == keep.AnyOf((keep.LastN(3), keep.BestN(2, "loss", "min")))


@pytest.mark.parametrize(
    ("is_mounted", "given", "tier", "tier_bytes"),
    [
        (False, None, None, None),
        (True, None, "volume", 7),
        (False, "ssd", "ssd", 7),
        (True, "ssd", "ssd", 7),
    ],
)
def test_what_the_code_names_comes_before_what_the_template_mounts(
    places: PodPaths,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    is_mounted: bool,
    given: str | None,
    tier: str | None,
    tier_bytes: int | None,
) -> None:
    folder = places.local_tier_folder.parent
    # The image may have such a folder too.
    places.local_tier_folder.mkdir()
    mounts = "22 1 0:30 / / rw,relatime - overlay overlay rw\n"
    if is_mounted:
        # Of the same file system as what is above it, as on a node that unpacks its images to folders.
        mounts += f"23 22 0:30 /pods/tier {places.local_tier_folder} rw,relatime - overlay overlay rw\n"
    monkeypatch.setattr(env, "read_mountinfo", lambda: mounts)
    CheckpointManager.from_env(
        places=places, local_tier=None if given is None else folder / given, local_tier_bytes=7
    )
    assert options["local_tier"] == (None if tier is None else folder / tier)
    assert options["local_tier_bytes"] == tier_bytes
