"""transformers' own KubeflowCallback sends what the operator's tests take for its posts (test_operator_endpoint.py)."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

RECORDED = Path(__file__).parents[2] / "data/kubeflow/trainer-status.json"


class Desk(HTTPServer):
    """Keep the posts, with the token of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.posts: list[tuple[str | None, Any]] = []


class Taking(BaseHTTPRequestHandler):
    server: Desk

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.headers["Authorization"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    @override
    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def desk() -> Iterator[Desk]:
    with Desk() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_it_sends_what_the_operator_takes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="`make test-newest` has the trainers, and runs this")
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import integration_utils

    (tmp_path / "token").write_text("the pod's token\n", encoding="ascii")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{desk.server_port}/trainer-status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True)
    assert arguments.report_to == ["kubeflow"]  # nothing in the script asks for it
    (made,) = integration_utils.get_reporting_integration_callbacks(arguments.report_to)
    callback, control = made(), TrainerControl()
    state = TrainerState(max_steps=400, epoch=1.2)
    callback.on_train_begin(arguments, state, control)
    callback.on_log(arguments, state, control, logs={"loss": 0.5, "learning_rate": 3e-05, "note": "text"})
    state.global_step = 120
    callback._last_update_time = float("-inf")  # it sends a step's post every 5 s at most
    callback.on_step_end(arguments, state, control)
    callback.on_train_end(arguments, state, control)
    assert {token for token, _ in desk.posts} == {"Bearer the pod's token"}
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert [_without_times(body) for _, body in desk.posts] == [_without_times(body) for body in recorded]


def _without_times(body: dict[str, Any]) -> dict[str, Any]:
    """Leave out the values that depend on the clock, but not whether they are there, and their types."""
    status = dict(body["trainerStatus"])
    for name in status.keys() & {"lastUpdatedTime", "estimatedRemainingSeconds"}:
        status[name] = type(status[name]).__name__
    return {"trainerStatus": status}
