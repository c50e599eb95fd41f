"""An evaluator constructs a manager every second, and nobody closes one: torch_xla's has no such call."""

import json
import signal
from pathlib import Path

from fork_server import ForkServer

SCRIPT = Path(__file__).parent / "manager_trainer" / "many.py"


def test_any_number_of_managers_takes_no_descriptors_threads_or_signals(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    ended = torch_server.run([SCRIPT, tmp_path / "root", 100], timeout=250)
    assert ended.returncode == -signal.SIGTERM, ended.stderr[-3000:]
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    assert said[0] == {"fds": 0, "threads": 0}
    assert said[1] == {"collected": True, "fds": 0}
    assert said[2:] == [{"collected": True, "left": []}] * 2
