"""What can happen to a job and to the cluster around it, one function for each. The teller counts what it did."""

from collections.abc import Callable
from typing import Any, Final

from operator_stories.teller import Teller

from fake_cluster.kubelets import saved_message, termination_message
from stepkeeper.contract import ExitCode

__all__ = ["HAPPENINGS", "mend_the_spec"]

_NODES: Final = ("n1", "n2", "n3", "n4")
_REFUSED: Final[tuple[dict[str, Any], ...]] = (
    {"ttlSecondsAfterFinished": "soon"},
    {"checkpoint": "somewhere"},
)
"""A field that can't be read, and a spec that is none without the part that can't be read."""


def a_trainer_fails(teller: Teller) -> None:
    teller.end_one(1)


def two_trainers_fail_at_once(teller: Teller) -> None:
    teller.end_one(1)
    teller.end_one(teller.random.choice([1, int(ExitCode.PEER_LOST)]))


def a_trainer_is_done(teller: Teller) -> None:
    teller.end_one(0, teller.random.choice(["", termination_message(ExitCode.DONE, step=teller.step)]))


def all_trainers_are_done(teller: Teller) -> None:
    for _ in teller.alive():
        teller.end_one(0)


def a_trainer_saves_and_stops_alone(teller: Teller) -> None:
    words = [
        "",
        saved_message(sequence=7, step=1),
        termination_message(ExitCode.SAVED, notice="peer", step=1),
    ]
    teller.end_one(int(ExitCode.SAVED), teller.random.choice(words))


def a_trainer_fails_and_its_peer_saves(teller: Teller) -> None:
    teller.end_one(1)
    teller.world.now += teller.random.choice([0, 1])
    teller.end_one(int(ExitCode.SAVED), termination_message(ExitCode.SAVED, notice="peer", step=1))


def all_save_and_stop(teller: Teller) -> None:
    for pod in teller.alive():
        message = saved_message(sequence=7, step=1) if teller.random.random() < 0.5 else ""
        teller.world.controllers.end_pod(pod, int(ExitCode.SAVED), message=message)


def a_pod_is_evicted(teller: Teller) -> None:
    if alive := teller.alive():
        pod = teller.random.choice(alive)
        teller.world.controllers.disrupt(pod, "EvictionByEvictionAPI")
        if teller.random.random() < 0.5:
            teller.world.controllers.end_pod(pod, 143)


def a_machine_is_taken_back(teller: Teller) -> None:
    if alive := teller.alive():
        pod = teller.random.choice(alive)
        teller.world.controllers.disrupt(pod, "TerminationByKubelet")
        teller.world.controllers.end_pod(pod, int(ExitCode.SAVED))


def a_pod_is_deleted(teller: Teller) -> None:
    if alive := teller.alive():
        name = teller.random.choice(alive)["metadata"]["name"]
        teller.deletions += 1
        teller.world.cluster.mark_deleted("pods", "default", name, grace_s=30)


def a_job_is_deleted(teller: Teller) -> None:
    if jobs := teller.world.cluster.list_objects("jobs"):
        teller.deletions += 1
        teller.world.controllers.delete_job(teller.random.choice(jobs)["metadata"]["name"])


def the_jobset_is_deleted(teller: Teller) -> None:
    if teller.world.jobset is not None:
        teller.deletions += 1
        teller.world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)


def a_commit_is_reported(teller: Teller) -> None:
    if teller.alive():
        teller.report(commits=True)


def steps_are_reported(teller: Teller) -> None:
    for _ in range(teller.random.randint(1, 4)):
        if teller.alive():
            teller.report(steps=1, after_s=teller.random.choice([10, 10, 300]))


def the_step_stands_still(teller: Teller) -> None:
    for _ in range(teller.random.randint(1, 4)):
        if teller.alive():
            teller.report(after_s=teller.random.choice([10, 1000]))


def the_job_is_suspended(teller: Teller) -> None:
    teller.world.edit(suspend=True)


def the_job_is_resumed(teller: Teller) -> None:
    teller.world.edit(suspend=False)


def the_image_is_changed(teller: Teller) -> None:
    container = {"name": "trainer", "image": f"trainer:{teller.random.randint(0, 2)}"}
    teller.world.edit(template={"spec": {"containers": [container]}})


def the_spec_is_refused(teller: Teller) -> None:
    teller.world.edit(**teller.random.choice(_REFUSED))


def mend_the_spec(teller: Teller) -> None:
    """Take back what was refused, and keep the other edits."""
    world = teller.world
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    strange = {key for refused in _REFUSED for key in refused if raw["spec"].get(key) == refused[key]}
    if strange:
        kept = {key: value for key, value in raw["spec"].items() if key not in strange}
        known = {key: value for key, value in teller.spec.items() if key in strange}
        world.cluster.put("checkpointedtrainingjobs", raw | {"spec": kept | known})
        world.edit()


def kueue_evicts_the_job(teller: Teller) -> None:
    teller.world.controllers.kueue.evict("Preempted", "a workload with a higher priority needs the quota")


def kueue_has_quota(teller: Teller) -> None:
    teller.world.controllers.kueue.quota = True


def the_operator_is_restarted(teller: Teller) -> None:
    teller.unseen = True
    teller.world.restart_operator()


def the_operator_is_away(teller: Teller) -> None:
    teller.unseen = True
    teller.world.stop_operator()
    teller.world.controllers.sync()
    if teller.random.random() < 0.5:
        teller.random.choice(_WHILE_AWAY)(teller)
        teller.world.now += teller.random.choice([1, 30])
        teller.world.controllers.sync()
    teller.world.restart_operator()


def watches_are_late(teller: Teller) -> None:
    teller.unseen = True
    teller.world.delay_watches(
        *teller.random.sample(["pods", "jobs", "jobsets", "workloads"], teller.random.randint(1, 2))
    )


def watches_are_delivered(teller: Teller) -> None:
    teller.world.deliver_watches()


def a_node_is_lost(teller: Teller) -> None:
    if not teller.world.controllers.stuck:
        teller.world.lose_node(teller.random.choice(_NODES))


def half_a_minute_passes(teller: Teller) -> None:
    teller.world.now += 30


def an_hour_passes(teller: Teller) -> None:
    teller.world.now += 3600


_WHILE_AWAY: Final = (
    a_trainer_fails,
    a_trainer_is_done,
    a_trainer_saves_and_stops_alone,
    a_pod_is_evicted,
    a_job_is_deleted,
    kueue_evicts_the_job,
)
HAPPENINGS: Final[tuple[Callable[[Teller], None], ...]] = (
    a_trainer_fails,
    a_trainer_fails,
    two_trainers_fail_at_once,
    a_trainer_is_done,
    all_trainers_are_done,
    a_trainer_saves_and_stops_alone,
    a_trainer_fails_and_its_peer_saves,
    all_save_and_stop,
    a_pod_is_evicted,
    a_machine_is_taken_back,
    a_pod_is_deleted,
    a_job_is_deleted,
    the_jobset_is_deleted,
    a_commit_is_reported,
    a_commit_is_reported,
    steps_are_reported,
    the_step_stands_still,
    the_job_is_suspended,
    the_job_is_resumed,
    the_job_is_resumed,
    the_image_is_changed,
    the_spec_is_refused,
    mend_the_spec,
    kueue_evicts_the_job,
    kueue_has_quota,
    the_operator_is_restarted,
    the_operator_is_away,
    watches_are_late,
    watches_are_delivered,
    a_node_is_lost,
    half_a_minute_passes,
    an_hour_passes,
)
