"""The demo: a training on a real cluster is preempted, its node loses power, and it comes to its end all the same."""

import json
import os
import time
from typing import Any

import yaml

from demo.director import Act, Director, midway
from demo.furnishing import ROOT, TRAINING
from demo.kubectl import Kubectl
from demo.performance import describe_attempts, judge, perform
from demo.picture import draw
from demo.stage import open_stage
from demo.story import Story, broken_claims, lost_steps
from demo.watch import Watch
from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster

__all__ = ["main"]

_JOB_FILE = TRAINING / "job.yaml"
_PICTURES = (ROOT / "out" / "demo.png", ROOT / "out" / "demo.svg")
_QUIET_S = 240
"""A slow machine takes its time; one on which nothing moves for so long is stuck."""
_SPOT, _POWER = "Spot preemption", "Power cut"


def main() -> int:
    """0: everything that the demo claims has happened."""
    return perform(_play)


def _play() -> int:
    job = for_test_cluster(yaml.safe_load(_JOB_FILE.read_text(encoding="utf-8")))
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    with open_stage(image=trainer["image"], keep=bool(os.environ.get("KEEP"))) as cluster:
        return _play_on(cluster, job)


def _play_on(cluster: Cluster, job: dict[str, Any]) -> int:
    name, spec = job["metadata"]["name"], job["spec"]
    kubectl = Kubectl(environment=cluster.environment)
    began_s = time.time()
    kubectl.run("apply", "-f", "-", stdin=json.dumps(job))
    director = Director(acts=_acts(cluster, spec), total_steps=spec["totalSteps"], started_unix_s=began_s)
    director.print_line(
        f"kubectl apply -f {_JOB_FILE.relative_to(ROOT)}, with this cluster's bucket and torch"
    )
    with Watch(kubectl, job=name, uri=spec["checkpoint"]["uri"]) as watch:
        story = director.follow(watch.events, quiet_s=_QUIET_S)
    return _show(story, kubectl, name)


def _acts(cluster: Cluster, spec: dict[str, Any]) -> list[Act]:
    """Bring about one disruption with notice and one without, both midway between two saves."""
    total_steps = spec["totalSteps"]
    interval = spec["checkpoint"]["interval"]["every"]["steps"]
    # A save that is under way at a power cut may yet commit, and then there would be nothing to lose.
    at_stake = interval // 2
    return [
        Act(
            name=_SPOT,
            explanation="its pods get SIGTERM and 15 s, then the machine is gone; another comes",
            cause=lambda node: cluster.faults.spot_preemption(node, back_after_s=3),
            at_step=midway(total_steps * 3 // 10, interval),
            uncommitted_steps=at_stake,
        ),
        Act(
            name=_POWER,
            explanation="everything on it ends at once, without a notice",
            cause=cluster.faults.power_cut,
            at_step=midway(total_steps * 6 // 10, interval),
            uncommitted_steps=at_stake,
        ),
    ]


def _show(story: Story, kubectl: Kubectl, name: str) -> int:
    print("\n$ kubectl get ctj\n" + kubectl.run("get", "ctj"), flush=True)
    print(f"$ kubectl describe ctj {name}\n{describe_attempts(kubectl, name)}\n", flush=True)
    lost = sum(len(lost_steps(story, index)) for index in range(len(story.attempts)))
    draw(story, *_PICTURES, title=f"{name}: {story.total_steps} steps, one Spot preemption, one power cut")
    print("picture: " + ", ".join(str(path.relative_to(ROOT)) for path in _PICTURES))
    broken = broken_claims(story, disruptions=[_SPOT, _POWER])
    if not lost:
        broken.append("no uncommitted step was lost at the power cut: nothing shows that work is done again")
    return judge(
        broken,
        as_claimed=f"resumed from the newest commit each time; {lost} steps done again, bit-equal; Complete",
    )
