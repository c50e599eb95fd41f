"""Jobs as their users have written them, on a cluster: README's, and those of the examples."""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from page_blocks import ROOT, read_blocks
from typing_extensions import override

from stepcluster import images
from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster
from stepcluster.shelljobs import Gangs, ShellJob, apply_all, watch_gangs
from stepkeeper.contract import Termination
from stepkeeper.log import Log, LogState
from stepkeeper.storage import open_store

OWN: Final = Path(__file__).parent
PATIENCE_S: Final = 240.0
ENDLESS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Story(ShellJob):
    """A job as its user has written it, changed for this cluster, in a namespace of its own."""

    containers: Sequence[Mapping[str, Any]] = ()
    job: Mapping[str, Any]
    gangs: list[Gangs] = field(default_factory=list)
    """What is seen of its pods, once it is applied."""

    first_pods: list[str] = field(default_factory=list)
    """The pods of its first attempt, once that trains."""

    @override
    def manifest(self) -> dict[str, Any]:
        return {**self.job, "metadata": {"name": self.name, "namespace": self.name}}

    @property
    def uri(self) -> str:
        return str(self.job["spec"]["checkpoint"]["uri"])

    def read_log(self) -> LogState:
        return Log(open_store(self.uri)).open()

    def until_trains(self, *, attempt: int) -> dict[str, Any]:
        """Wait until it has done some steps in this attempt, which goes on where the one before has stopped.

        Returns:
            Its status then.

        """

        def is_so(status: dict[str, Any]) -> bool:
            attempts = status.get("attempts") or [{}]
            began = attempts[-1].get("fromStep") or 0
            done = (status.get("progress") or {}).get("step") or 0
            return attempts[-1].get("number") == attempt and done > began + 2 and (attempt == 1 or began > 0)

        status = self.until(is_so, timeout_s=PATIENCE_S)
        if attempt == 1:
            self.first_pods.extend(pod["metadata"]["name"] for pod in self.pods())
        return status

    def patch_spec(self, **changes: Any) -> None:
        self.kubectl("patch", "ctj", self.name, "--type=merge", "-p", json.dumps({"spec": changes}))

    def first_ends(self) -> list[tuple[int, Termination]]:
        """Return exit code and last word of each pod of the first attempt."""
        (gangs,) = self.gangs
        unseen = [pod for pod in self.first_pods if pod not in gangs.trainers]
        assert not unseen, f"how the trainers of {unseen} ended was not seen\n{self.describe()}"
        ends = [gangs.trainers[pod] for pod in self.first_pods]
        return [(int(end["exitCode"]), Termination.from_json(end["message"])) for end in ends]

    def end(self) -> int:
        """Delete the job, whose pods save then, and return the last step that is saved."""
        for gangs in self.gangs:
            gangs.jobset_is_deleted()
        self.kubectl("delete", "ctj", self.name)
        deadline = time.monotonic() + PATIENCE_S
        while self.pods():
            assert time.monotonic() < deadline, f"pods of {self.name} don't end\n{self.describe()}"
            time.sleep(0.5)
        latest = self.read_log().latest
        assert latest is not None
        return latest.step


def readme_story(cluster: Cluster) -> Story:
    (block,) = (each for each in read_blocks("README.md") if each.language == "yaml")
    job = for_test_cluster(yaml.safe_load(block.text), torch_xla=False)
    return Story(cluster=cluster, name="llm", job=job)


def example_story(cluster: Cluster, example: str, nodes: Sequence[str], *, name: str | None = None) -> Story:
    """The example's own manifest, without an end, under its own or another name."""
    name = name or example
    job = yaml.safe_load((ROOT / "examples" / example / "job.yaml").read_text())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["totalSteps"] = ENDLESS
    spec["checkpoint"]["uri"] = f"gs://checkpoints/{name}"
    (trainer,) = spec["template"]["spec"]["containers"]
    trainer["args"] = [*trainer["args"][:-1], f"--steps={ENDLESS}", "--pause-seconds=0.3"]
    # As the undisturbed run has it, for the same bits.
    trainer["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    return Story(cluster=cluster, name=name, job=for_test_cluster(job, nodes=nodes, torch_xla=False))


def maintained_story(cluster: Cluster, nodes: Sequence[str], *, metadata_host: str) -> Story:
    """examples/fsdp2 on machines that have this metadata server. Only what it is told makes it save."""
    story = example_story(cluster, "fsdp2", nodes, name="maintained")
    story.job["spec"]["checkpoint"]["interval"] = {"every": {"steps": ENDLESS}}
    (trainer,) = story.job["spec"]["template"]["spec"]["containers"]
    trainer["env"].append({"name": "GCE_METADATA_HOST", "value": metadata_host})
    return story


def build_images(folder: Path) -> list[Path]:
    """Build the images that the manifests name; README's has its script, and its reader's own model."""
    app = folder / "app"
    app.mkdir()
    (script,) = (each for each in read_blocks("README.md") if each.language == "python")
    (app / "train.py").write_text(script.text)
    (app / "my_model.py").write_text((OWN / "my_model.py").read_text())
    _, readmes = images.trainer(app, name="my-registry/my-trainer:1", folder="/app/app")
    examples = [
        images.trainer(ROOT / "examples" / name, name=f"my-registry/{name}:1")[1] for name in ("ddp", "fsdp2")
    ]
    return [readmes, *examples]


@contextmanager
def applied(cluster: Cluster, stories: Sequence[Story]) -> Iterator[None]:
    """Apply the jobs, which stay as long as the cluster, with what their users have beside them; watch their pods."""
    storage = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "object-storage", "namespace": story.name},
            "data": {"STORAGE_EMULATOR_HOST": cluster.gcs_url},
        }
        for story in stories
    ]
    accounts = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {
                "name": story.job["spec"]["template"]["spec"]["serviceAccountName"],
                "namespace": story.name,
            },
        }
        for story in stories
        if "serviceAccountName" in story.job["spec"]["template"]["spec"]
    ]
    with ExitStack() as stack:
        for story in stories:
            story.gangs.append(stack.enter_context(watch_gangs(story)))
        apply_all(cluster, stories, *itertools.chain(storage, accounts))
        yield
