"""The README's training script, with a model beside it: started a second time it goes on where the first ended."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.log import Log
from stepkeeper.storage import open_store

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")

MODEL = """
import torch

torch.manual_seed(0)


def build():
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters()), [torch.ones(3)] * 5


def train(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
AFTER = """
moments = optimizer.state[model.weight]
assert moments["step"] == step, moments
print(restored.step if restored else None, step)
"""


@pytest.fixture
def script() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(found)


def test_it_resumes(script: str, tmp_path: Path) -> None:
    root = (tmp_path / "root").as_uri()
    # As the user guide says for a process without an operator.
    own = script.replace("CheckpointManager.from_env()", f"CheckpointManager({root!r}, save_interval=5)")
    assert own != script
    path = tmp_path / "train.py"
    path.write_text(own + AFTER, encoding="utf-8")
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    # gloo has a word of its own on stdout.
    assert [words[-2:] for words in said] == [["None", "5"], ["5", "10"]]
    latest = Log(open_store(root)).open().latest
    assert latest is not None
    assert latest.step == 10
