"""Trainings with real trainers, stopped at random batches, do what an undisturbed one does, to the bit."""

import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from fork_server import ForkServer
from free_ports import free_port

from stepkeeper import CheckpointManager
from stepkeeper_testing.damage import flip

TRAININGS = Path(__file__).parent / "trainings"
pytestmark = pytest.mark.timeout(1200)
MOST_STARTS = 20
NOTED = ("train ", "evaluate ", "validate ", "log ", "end ")


def run(
    server: ForkServer, folder: Path, kind: str, script: str, *, stop_at: int = 0
) -> tuple[int, list[str]]:
    """Start the training, or two ranks of it, the second of which gets SIGTERM. Return rank 0's code and lines."""
    n_ranks = 2 if "ranks" in kind else 1
    port = str(free_port())
    with ExitStack() as files:
        outputs = [files.enter_context((folder / f"output-{rank}").open("w+")) for rank in range(n_ranks)]
        errors = [files.enter_context((folder / f"errors-{rank}").open("w+")) for rank in range(n_ranks)]
        processes = []
        for rank in range(n_ranks):
            group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [
                TRAININGS / f"{script}.py",
                folder / "root",
                kind,
                stop_at if rank == n_ranks - 1 else 0,
            ]
            env = {**os.environ, "HF_HUB_OFFLINE": "1", **(group if n_ranks > 1 else {})}
            processes.append(
                server.start(command, env=env, cwd=folder, stdout=outputs[rank], stderr=errors[rank])
            )
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for file in (*outputs, *errors):
            file.seek(0)
        assert len(set(codes)) == 1, (codes, [each.read()[-3000:] for each in errors])
        logged = errors[0].read()
        assert codes[0] in (0, 75), logged[-4000:]
        assert "had none when this process restored" not in logged, "the optimizer wasn't primed"
        # The trainers print more, such as how long an evaluation took.
        lines = [line for output in outputs for line in output.read().splitlines()]
        return codes[0], [line for line in lines if line.startswith(NOTED)]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("with_transformers", "plain"),
        ("with_transformers", "peft"),
        ("with_transformers", "epoch-workers"),
        ("with_transformers", "ranks"),
        ("with_accelerate", "plain"),
        ("with_accelerate", "seedable-workers"),
        ("with_accelerate", "generator-scaler"),
        ("with_accelerate", "stateful"),
        ("with_accelerate", "stateful-seedable-workers"),
        ("with_accelerate", "ranks"),
        ("with_lightning", "plain"),
        ("with_lightning", "noise-workers"),
        ("with_lightning", "stateful"),
        ("with_lightning", "stateful-workers"),
        ("with_lightning", "plateau"),
        ("with_lightning", "ranks"),
        ("with_torchtitan", "plain"),
        ("with_torchtitan", "workers"),
    ],
)
def test_a_stopped_training_is_an_undisturbed_one(
    trainers_server: ForkServer, tmp_path: Path, script: str, kind: str
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    folders = [tmp_path / name for name in ("undisturbed", "stopped")]
    for folder in folders:
        folder.mkdir()
    code, undisturbed = run(trainers_server, folders[0], kind, script)
    assert code == 0
    n_batches = sum(line.startswith("train ") for line in undisturbed) // (2 if "ranks" in kind else 1)
    assert n_batches > 10

    seen: dict[int, list[str]] = {}
    for start in range(MOST_STARTS):
        # The first one is stopped in any case.
        stop_at = chance.randrange(1, n_batches - 2 if start == 0 else n_batches)
        code, seen[start] = run(trainers_server, folders[1], kind, script, stop_at=stop_at)
        print(f"stopped at batch {stop_at}: exit code {code}, {len(seen[start])} lines")
        if code == 0:
            break
    assert code == 0
    assert len(seen) > 1, "it was never stopped"
    assert sorted(line for lines in seen.values() for line in lines) == sorted(undisturbed)
    if "ranks" not in kind:
        assert [line for lines in seen.values() for line in lines] == undisturbed
    if kind == "peft":
        assert_adapters_only(folders[1] / "root")


def test_transformers_goes_back_to_the_commit_before_a_damaged_one(
    trainers_server: ForkServer, tmp_path: Path
) -> None:
    """The trainer reads its position before the rest, and must read both of one commit."""
    for name in ("undisturbed", "damaged"):
        (tmp_path / name).mkdir()
    _, undisturbed = run(trainers_server, tmp_path / "undisturbed", "plain", "with_transformers")
    folder = tmp_path / "damaged"
    code, before = run(trainers_server, folder, "plain", "with_transformers", stop_at=13)
    assert code == 75
    manager = CheckpointManager(folder / "root")
    newest = Path(manager.metadata(manager.steps()[-1]).uri.removeprefix("file://"))
    flip(max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size), 1000)
    code, lines = run(trainers_server, folder, "plain", "with_transformers")
    assert code == 0
    assert len(undisturbed) - len(before) < len(lines) < len(undisturbed)
    assert lines == undisturbed[-len(lines) :]


def assert_adapters_only(root: Path) -> None:
    manager = CheckpointManager(root)
    names = [name for name in manager.metadata(manager.steps()[-1]).tensors if name.startswith("model.")]
    assert names
    assert [name for name in names if "lora_" not in name] == []
