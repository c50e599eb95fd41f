"""What a training is told at once where it has no access to its bucket: what lacks, and what to do about it."""

import pytest
import torch
from storage_faults.proxy import Fault, faulty
from typer.testing import CliRunner

from stepkeeper.cli.app import app
from stepkeeper.errors import NoAccessError
from stepkeeper_testing.trainer import open_manager

URI = "gs://my-bucket/run"
_MOST_REQUESTS = 12
"""A restore and a save ask a few times each. A refusal that is retried for a minute takes more."""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("status", "told"),
    [
        pytest.param(
            404,
            r"there is no bucket 'my-bucket' \(said the proxy\).*"
            r"gcloud storage buckets create gs://my-bucket --location=REGION",
            id="no bucket",
        ),
        pytest.param(
            403,
            r"not allowed \(said the proxy\).*add-iam-policy-binding gs://my-bucket.*"
            r"--role=roles/storage\.objectUser",
            id="no permission",
        ),
        pytest.param(401, r"no valid credentials.*gcloud auth", id="bad credentials"),
    ],
)
def test_a_training_is_told_what_to_do(status: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[str] = []

    def refuse(method: str, about: str) -> Fault:
        came.append(f"{method} {about}")
        return status

    state = {"w": torch.zeros(2)}
    with faulty("http://no-emulator") as proxy:
        proxy.rule = refuse
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.address)
        manager = open_manager(URI)
        with pytest.raises(NoAccessError, match=told):
            manager.restore(state)
        with pytest.raises(NoAccessError, match=told):
            manager.step(1, state)
        with pytest.raises(NoAccessError, match=told):
            manager.steps()
        manager.close()
        said = CliRunner().invoke(app, ["ls", URI])
        assert said.exit_code == 3
        assert "my-bucket" in said.stderr
    assert 3 <= len(came) <= _MOST_REQUESTS
