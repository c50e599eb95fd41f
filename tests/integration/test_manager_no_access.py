"""What a training is told at once where it has no access to its bucket: what lacks, and what to do about it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from typing_extensions import override

from stepkeeper import CheckpointManager, Options
from stepkeeper.cli.app import app
from stepkeeper.errors import NoAccessError

URI = "gs://my-bucket/run"
_MOST_REQUESTS = 12
"""A restore and a save ask a few times each. A refusal that is retried for a minute takes more."""


@contextmanager
def refusing(status: int, says: str) -> Iterator[tuple[str, list[str]]]:
    """Serve Cloud Storage's answer to everything: the address, and the requests that came."""
    came: list[str] = []
    body = json.dumps({"error": {"code": status, "message": says}}).encode()

    class Refuse(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            came.append(self.requestline)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = answer  # noqa: N815  # the server looks for these names

        @override
        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()
        thread.join()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("status", "says", "told"),
    [
        pytest.param(
            404,
            "The specified bucket does not exist.",
            r"there is no bucket 'my-bucket' \(The specified bucket does not exist\).*"
            r"gcloud storage buckets create gs://my-bucket --location=REGION",
            id="no bucket",
        ),
        pytest.param(
            403,
            "trainer@project.iam.gserviceaccount.com does not have storage.objects.list access.",
            r"not allowed \(trainer@.*list access\).*add-iam-policy-binding gs://my-bucket.*"
            r"--role=roles/storage\.objectUser",
            id="no permission",
        ),
        pytest.param(401, "Invalid Credentials", r"no valid credentials.*gcloud auth", id="bad credentials"),
    ],
)
def test_a_training_is_told_what_to_do(
    status: int, says: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(2)}
    with refusing(status, says) as (address, came):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        manager = CheckpointManager(URI, save=1, options=Options(stop_on_notice=False))
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
