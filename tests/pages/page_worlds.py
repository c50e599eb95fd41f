"""Set up what the pages say is there: buckets, roots, files, and the pod that a job's script runs in."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from page_blocks import ROOT, read_blocks
from page_reader import Reader

from stepkeeper.contract import CONTAINER_NAME, SETTINGS_FOLDER, TOKEN_FILE
from stepkeeper.log import CommitRecord, Log
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper.storage import open_store
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.build.objects import build_config_map
from stepkeeper_operator.training_jobs.build.pod import build_pod_template
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.pod import pod_identity

BUCKETS: Final = ("bucket", "my-bucket")
"""Buckets of which pages speak."""

_JOB: Final = {
    "apiVersion": "stepkeeper.dev/v1alpha1",
    "kind": "CheckpointedTrainingJob",
    "metadata": {"name": "llm", "namespace": "default", "uid": "uid-1"},
    "spec": {
        "placement": {"hosts": {"count": 1}},
        "checkpoint": {"uri": "gs://my-bucket/runs/llm", "interval": {"every": {"steps": 500}}},
        "template": {"spec": {"containers": [{"name": CONTAINER_NAME, "image": "my-registry/my-trainer:1"}]}},
    },
}


def _in_pod(reader: Reader, job: Mapping[str, Any] = _JOB) -> None:
    """Put the reader into the first pod of the job, as the operator and Kubernetes make it."""
    parsed = CheckpointedTrainingJob.model_validate(job)
    settings = OperatorSettings()
    template = build_pod_template(
        parsed, number=0, unreachable_s=settings.unreachable_toleration_s, machines=None
    )
    (trainer,) = (each for each in template["spec"]["containers"] if each["name"] == CONTAINER_NAME)
    name = f"{parsed.metadata.name}-workers-0-0-abcde"
    fields = {"metadata.name": name, "metadata.uid": "pod-uid", "spec.nodeName": "node-a"}
    reader.knows(
        **{
            variable["name"]: variable["value"]
            if "value" in variable
            # What is left are labels that count from 0.
            else fields.get(variable["valueFrom"]["fieldRef"]["fieldPath"], "0")
            for variable in trainer["env"]
            if not variable["name"].startswith("KUBEFLOW_")
        }
    )
    for name, text in build_config_map(parsed, settings, ca_pem="")["data"].items():
        reader.finds(f"{SETTINGS_FOLDER}/{name}", text)
    reader.finds(TOKEN_FILE, "token")


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _hugging_face_folder(reader: Reader) -> None:
    from safetensors.torch import save_file

    folder = reader.folder / "Llama-3.2-1B"
    folder.mkdir()
    save_file({"embed.weight": torch.ones(4, 8)}, folder / "model.safetensors")


def _formats(reader: Reader) -> None:
    torch.save({"model": torch.nn.Linear(8, 2).state_dict()}, reader.folder / "model.pt")
    _hugging_face_folder(reader)


def _command_line(reader: Reader) -> None:
    """The roots that the examples of the command list, entry by entry."""
    _hugging_face_folder(reader)
    url = "gs://bucket/runs/lm"
    reader.knows(URL=url)
    lm = SmallRoot(url)

    def begin(attempt: int, host: str, base: int | None = None) -> None:
        lm.claim = lm.log.begin(pod_identity(restart_attempt=attempt), base=base, host=host)

    def save(step: int, loss: str) -> CommitRecord:
        return lm.save(step, value=_saved(step), metrics={"loss": loss})

    begin(0, "tpu-a-0")
    first = save(10, "2.75")
    save(20, "2.41")
    begin(1, "tpu-b-0", first.slot)
    lm.log.mark_restored(lm.claim, first.slot)
    save(15, "2.52")
    bad = save(20, "2.4")
    lm.log.quarantine(lm.claim, bad.slot, "bad bytes")
    save(25, "2.31")

    large = SmallRoot(
        "gs://bucket/runs/large", words=f"begin {' '.join(str(step) for step in range(10, 420, 10))}"
    )
    for slot, nonce, seen, pid, host in (
        (42, "9b1f6c0e5a7d4f2b8e3c1d0a9f8e7d6c", 48, 4711, 0),
        (17, "04d246d85cb69e4898c27a3330d44f0a", 19, 98, 1),
    ):
        holder = f"follow by process {pid}"
        pin = Pin(slot=slot, nonce=nonce, seen=seen, holder=holder, host=f"eval-{host}", reason="follow")
        put_pin(large.store, pin)
    assert large.play("1200") == 42
    large.play("-17 1210 1220 1230 1240 1250 1260 1270")


def _managed(reader: Reader) -> None:
    """A root whose slot 42 is on a branch that a training without a restore has abandoned."""
    root = SmallRoot("gs://bucket/run")
    root.claim = root.log.begin()
    for step in range(10, 410, 10):
        root.save(step)
    reader.aside(_TWO_TRAININGS)


_TWO_TRAININGS: Final = """
import torch
from stepkeeper import CheckpointManager, prime_optimizer

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
prime_optimizer(optimizer)
state = {"model": model, "optimizer": optimizer}
for step in (1200, 100):
    with CheckpointManager("gs://bucket/run") as manager:
        manager.save(step, state)
"""
"""README's state."""


def _readme(reader: Reader) -> None:
    _in_pod(reader)
    (reader.folder / "my_model.py").write_text(_MY_MODEL, encoding="utf-8")


def _with_lightning(reader: Reader) -> None:
    """Lightning itself isn't here: a page's callback is defined, and those that call it are in test_manager_told."""
    (reader.folder / "lightning.py").write_text("class Callback: ...\n", encoding="utf-8")


def _with_slurm(reader: Reader) -> None:
    """Programs in place of Slurm's: two tasks on one node. The first start is asked to stop after its first commit."""
    folder = reader.folder / "bin"
    folder.mkdir()
    for name, text in _SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        (folder / name).chmod(0o755)
    reader.knows(PATH=f"{folder}:{reader.env['PATH']}")


_SLURM: Final = {
    "sbatch": """
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=localhost SLURM_NTASKS=2 SLURM_RESTART_COUNT=0
while :; do
  bash "$1"
  code=$?
  [[ -e requeued ]] || exit $code
  rm requeued
  echo $code >> ended
  ((++SLURM_RESTART_COUNT))
done
""",
    "scontrol": """
if [[ $1 == show ]]; then echo "$3"; else touch requeued; fi
""",
    "srun": """
while [[ $1 == --* ]]; do shift; done
tasks=()
for number in 0 1; do
  SLURM_PROCID=$number SLURM_LOCALID=$number "$@" &
  tasks+=($!)
done
if [[ $SLURM_RESTART_COUNT == 0 ]]; then
  until compgen -G 'runs/lm/500/*' > /dev/null; do sleep 0.1; kill -0 $! || break; done
  kill -TERM "${tasks[@]}"
fi
greatest=0
for task in "${tasks[@]}"; do
  wait "$task"
  code=$?
  ((code > greatest)) && greatest=$code
done
exit $greatest
""",
}


_MY_MODEL: Final = """
import torch


def build():
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters()), [torch.ones(3)] * 5


def train(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
"""What README's script imports as its reader's own."""


WORLDS: Final[Mapping[str, Callable[[Reader], None]]] = {
    "README.md": _readme,
    "docs/user/cli.md": _command_line,
    "docs/user/formats.md": _formats,
    "docs/user/launching.md": _in_pod,
    "docs/user/manager.md": _in_pod,
    "docs/user/manager-reference.md": _managed,
    "docs/user/preemption.md": _with_lightning,
    "docs/user/slurm.md": _with_slurm,
    "docs/user/training-script.md": _in_pod,
    "examples/ddp/README.md": lambda reader: reader.goes(ROOT / "examples/ddp"),
    "examples/fsdp2/README.md": lambda reader: reader.goes(ROOT / "examples/fsdp2"),
}
"""What is there before somebody does what a page says, by page."""


def _resumes(reader: Reader) -> None:
    """README's script goes on where it ended: started once more, after the end of its five batches."""
    assert _latest("gs://my-bucket/runs/llm").step == 5
    (script,) = (block for block in read_blocks("README.md") if block.language == "python")
    reader.does(script)
    reader.leaves_python()
    assert _latest("gs://my-bucket/runs/llm").step == 10


def _trained(reader: Reader) -> None:
    assert _latest("gs://my-bucket/runs/llm").step == 1000


def _saved_the_steps_of_the_guide(_reader: Reader) -> None:
    line = Log(open_store("gs://my-bucket/runs/llm")).open().line
    assert [commit.step for commit in line] == [100, 25]


def _was_requeued(reader: Reader) -> None:
    assert (reader.folder / "ended").read_text(encoding="utf-8").split() == ["75"]
    assert _latest((reader.folder / "runs/lm").as_uri()).step == 2000


def _has_adapters_only(reader: Reader) -> None:
    latest = _latest((reader.folder / "checkpoints").as_uri())
    assert latest.step == 10
    # Two adapters of 2 x 4 x 256 numbers, with two moments each; a base layer alone has 65,536.
    assert latest.size_bytes < 4 * 65536


def _closed(reader: Reader) -> None:
    """A kernel that is started again, and runs the first cell, has the step that the last one saved."""
    assert _latest((reader.folder / "checkpoints").as_uri()).step == 250
    first, *_ = read_blocks("docs/user/notebooks.md")
    reader.does(replace(first, text=f"{first.text}\nassert step == 250"))
    reader.leaves_python()


def _went_back(reader: Reader) -> None:
    """The last block takes the commit of slot 42 back, which an abandoned branch had."""
    assert _latest("gs://bucket/run").slot == 42


def _state_is_there(reader: Reader) -> None:
    reader.aside(
        """
from stepkeeper import CheckpointManager

found = {"tokens": 0}
with CheckpointManager("checkpoints") as manager:
    assert manager.steps() == [5, 10, 15, 20, 25, 30]
    manager.restore(found, 30, items=["tokens"])
assert found == {"tokens": 40960}
"""
    )


def _latest(uri: str) -> CommitRecord:
    latest = Log(open_store(uri)).open().latest
    assert latest is not None
    return latest


OWN_NETWORK: Final = frozenset({"docs/user/preemption.md", "docs/user/slurm.md"})
"""Pages whose programs listen on a port that some other program of this machine may have."""

CHECKS: Final[Mapping[str, Callable[[Reader], None]]] = {
    "README.md": _resumes,
    "docs/user/adapters.md": _has_adapters_only,
    "docs/user/manager-reference.md": _went_back,
    "docs/user/notebooks.md": _closed,
    "docs/user/slurm.md": _was_requeued,
    "docs/user/manager.md": _saved_the_steps_of_the_guide,
    "docs/user/state.md": _state_is_there,
    "docs/user/training-script.md": _trained,
}
"""What is true after that, by page."""
