"""A job's template turns the local tier on by mounting a volume for it: the training code says nothing of it."""

from pathlib import Path
from typing import Any

import pytest

from stepkeeper import CheckpointManager
from stepkeeper.contract import SETTINGS_FILE_NAME, Interval, Settings
from stepkeeper.env import Places
from stepkeeper.testing.pod import pod_identity


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    for name, value in pod_identity().to_env().items():
        monkeypatch.setenv(name, value)
    settings = Settings(uri="gs://bucket/run", interval=Interval(steps=1))
    (tmp_path / SETTINGS_FILE_NAME).write_bytes(settings.to_json())
    return Places(settings_folder=tmp_path, local_tier_folder=tmp_path / "volume")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a manager is constructed with, without becoming one."""
    found: dict[str, Any] = {}

    def note(_: CheckpointManager, *__: object, **given: object) -> None:
        found.update(given)

    monkeypatch.setattr(CheckpointManager, "__init__", note)
    return found


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
    places: Places,
    options: dict[str, Any],
    is_mounted: bool,
    given: str | None,
    tier: str | None,
    tier_bytes: int | None,
) -> None:
    folder = places.local_tier_folder.parent
    if is_mounted:
        places.local_tier_folder.mkdir()
    CheckpointManager.from_env(
        places=places, local_tier=None if given is None else folder / given, local_tier_bytes=7
    )
    assert options["local_tier"] == (None if tier is None else folder / tier)
    assert options["local_tier_bytes"] == tier_bytes
