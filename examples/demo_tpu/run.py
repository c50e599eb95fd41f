"""The demo: a job waits for Cloud TPU VMs, saves ahead of their maintenance, loses them, and resumes on new ones."""

import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from demo.director import Act, DemoError, Director
from demo.furnishing import ROOT
from demo.kubectl import Kubectl
from demo.line_printer import LinePrinter
from demo.performance import describe_attempts, judge, perform
from demo.story import Story, broken_claims
from demo.watch import Watch
from demo_tpu.cloud import Cloud
from demo_tpu.follower import Follower
from demo_tpu.picture import draw
from demo_tpu.stage import Stage, open_stage
from demo_tpu.story import MachinesStory, broken_machine_claims, find_notice_s
from demo_tpu.undisturbed import UndisturbedRun
from demo_tpu.watch import UndisturbedStep, watch_machines

__all__ = ["main"]

_RESOURCE_FILE, _JOB_FILE = (Path(__file__).with_name(name) for name in ("queued-resource.yaml", "job.yaml"))
_PICTURES = (ROOT / "out" / "demo-tpu.png", ROOT / "out" / "demo-tpu.svg")
_QUIET_S = 240
"""A slow machine takes its time; one on which nothing moves for so long is stuck."""
_AGAIN_S = 0.5
_MAINTENANCE = "Maintenance"
_AT_STEP = 70
_EXPLANATION = "the cloud announces it, and the machine won't come back"
_CAUSE = "SpotPreemption"


def main() -> int:
    """0: everything that the demo claims has happened."""
    return perform(_play)


def _play() -> int:
    with open_stage() as stage:
        return _play_on(stage)


def _play_on(stage: Stage) -> int:
    resource, job = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (_RESOURCE_FILE, _JOB_FILE))
    kubectl = Kubectl(environment=stage.cluster.environment)
    cloud = Cloud(remote=stage.cloud, resource=resource)
    cloud.take_room()
    print_line = LinePrinter(time.time())
    for path in (_RESOURCE_FILE, _JOB_FILE):
        kubectl.run("apply", "-f", str(path))
        print_line(f"kubectl apply -f {path.relative_to(ROOT)}")
    story, machines = _follow(cloud, kubectl, job, print_line)
    name, resource_name = job["metadata"]["name"], resource["metadata"]["name"]
    print("\n$ kubectl get qr,ctj\n" + kubectl.run("get", "qr,ctj"), flush=True)
    print(f"$ kubectl describe ctj {name}\n{describe_attempts(kubectl, name)}\n", flush=True)
    print_line(f"kubectl delete qr {resource_name}")
    _delete(kubectl, resource_name)
    machines.leftovers = cloud.names()
    print_line(f"the cloud has {', '.join(machines.leftovers) or 'nothing of it'}\n")
    return _judge(story, machines, name)


def _follow(
    cloud: Cloud, kubectl: Kubectl, job: dict[str, Any], print_line: LinePrinter
) -> tuple[Story, MachinesStory]:
    """Follow the job to its end. While it waits in the queue, the same training runs undisturbed on this machine."""
    n_steps, uri = job["spec"]["totalSteps"], job["spec"]["checkpoint"]["uri"]
    sources = [watch_machines(cloud.resource["metadata"]["name"])]

    def make_room(losses: Future[dict[int, str]]) -> None:
        if losses.exception() is None:
            print_line("the cloud has room now")
        cloud.make_room()

    def announce(_node: str) -> None:
        follower.note_announcement(time.time())
        cloud.announce_maintenance(starts_in_s=find_notice_s(director.story.attempts[-1].steps))

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor() as executor,
        UndisturbedRun(Path(folder), n_steps) as run,
        Watch(kubectl, job=job["metadata"]["name"], uri=uri, more=sources) as watch,
    ):
        losses = executor.submit(
            run.losses, each=lambda step: watch.events.put(UndisturbedStep(at_s=time.time(), step=step))
        )
        follower = Follower(print_line, when_waiting=lambda: losses.add_done_callback(make_room))
        director = Director(
            acts=[Act(name=_MAINTENANCE, explanation=_EXPLANATION, cause=announce, at_step=_AT_STEP)],
            total_steps=n_steps,
            started_unix_s=print_line.started_unix_s,
            also=follower.see,
        )
        story = director.follow(watch.events, quiet_s=_QUIET_S)
        follower.story.undisturbed = losses.result()
    return story, follower.story


def _delete(kubectl: Kubectl, name: str) -> None:
    kubectl.run("delete", "qr", name, "--wait=false")
    deadline = time.monotonic() + _QUIET_S
    while kubectl.run("get", "qr", name, "--ignore-not-found", "-o", "name"):
        if time.monotonic() > deadline:
            raise DemoError(f"QueuedResource {name} is still there {_QUIET_S} s after its deletion")
        time.sleep(_AGAIN_S)


def _judge(story: Story, machines: MachinesStory, name: str) -> int:
    title = (
        f"{name}: {story.total_steps} steps on Cloud TPU VMs that come, go for maintenance, and come again"
    )
    draw(story, machines, *_PICTURES, title=title)
    print("picture: " + ", ".join(str(path.relative_to(ROOT)) for path in _PICTURES))
    return judge(
        [
            *broken_claims(story, disruptions=[_MAINTENANCE]),
            *broken_machine_claims(story, machines, cause=_CAUSE),
        ],
        as_claimed=(
            "waited for its machines; saved ahead of their maintenance; resumed on new ones; one restart, no failure; "
            f"all {story.total_steps} losses bit-equal to an undisturbed run's; nothing left in the cloud"
        ),
    )
