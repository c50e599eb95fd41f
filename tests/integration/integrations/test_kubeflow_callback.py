"""transformers' own KubeflowCallback sends what the operator's tests take for its posts (test_operator_endpoint.py)."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_training_does_not_wait_for_the_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The callback posts in the train thread, which would wait 5 s each time where nobody answers."""
    pytest.importorskip("transformers", reason="`make test-newest` has the trainers, and runs this")
    from transformers import Trainer, TrainingArguments

    from stepkeeper import CheckpointManager
    from stepkeeper.integrations.transformers import train

    posted, answered, in_train_thread = threading.Event(), threading.Event(), []

    def post(*_: object, **__: object) -> None:
        in_train_thread.append(threading.current_thread() is threading.main_thread())
        posted.set()
        if not in_train_thread[-1]:
            answered.wait(60)
        raise TimeoutError

    (tmp_path / "token").write_text("the pod's token", encoding="ascii")
    monkeypatch.setattr("urllib.request.urlopen", post)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://operator.example/trainer-status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    rows = [{"x": torch.ones(2)}] * 16
    trainer = Trainer(Squared(), TrainingArguments(str(tmp_path / "out"), **options), train_dataset=rows)
    with CheckpointManager(str(tmp_path / "root"), save=2) as manager:
        train(trainer, manager)
    assert posted.wait(60)
    answered.set()
    assert in_train_thread == [False]  # the later posts are left out while nobody answers


class Squared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    @override
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).square().mean()}


def _without_times(body: dict[str, Any]) -> dict[str, Any]:
    """Leave out the values that depend on the clock, but not whether they are there, and their types."""
    status = dict(body["trainerStatus"])
    for name in status.keys() & {"lastUpdatedTime", "estimatedRemainingSeconds"}:
        status[name] = type(status[name]).__name__
    return {"trainerStatus": status}
