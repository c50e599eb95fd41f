"""What can happen to a job and to the cluster around it. The teller counts what it did."""

from typing import Any, Final

from operator_stories.story import Happening, Teller

from fake_cluster.kubelets import saved_message, termination_message
from stepkeeper.contract import ExitCode, Hang
from stepkeeper_operator.labels import RESTART_ANNOTATION

_SAVED: Final = int(ExitCode.SAVED)
_BY_PEER: Final = termination_message(ExitCode.SAVED, notice="peer", step=1)
HANG: Final = Hang(kind="Stopped", since_unix_s=1, text="rank 1 is stopped", stacks="rank 1:")
_REFUSED: Final[tuple[dict[str, Any], ...]] = (
    {"ttlSecondsAfterFinished": "soon"},
    {"checkpoint": "somewhere"},
)
"""A field that can't be read, and a spec that is none without the part that can't be read."""


def _two_fail(teller: Teller) -> None:
    teller.end_one(1)
    teller.end_one(teller.random.choice([1, int(ExitCode.PEER_LOST)]))


def _all_are_done(teller: Teller) -> None:
    for _ in teller.alive():
        teller.end_one(0)


def _one_fails_and_its_peer_saves(teller: Teller) -> None:
    teller.end_one(1)
    teller.world.now += teller.random.choice([0, 1])
    teller.end_one(_SAVED, _BY_PEER)


def _all_save(teller: Teller) -> None:
    for pod in teller.alive():
        message = saved_message(sequence=7, step=1) if teller.random.random() < 0.5 else ""
        teller.world.controllers.end_pod(pod, _SAVED, message=message)


def _delete_pod(teller: Teller) -> None:
    if alive := teller.alive():
        teller.deletions += 1
        name = teller.random.choice(alive)["metadata"]["name"]
        teller.world.cluster.mark_deleted("pods", "default", name, grace_s=30)


def _delete_job(teller: Teller) -> None:
    if jobs := teller.world.cluster.list_objects("jobs"):
        teller.deletions += 1
        teller.world.controllers.delete_job(teller.random.choice(jobs)["metadata"]["name"])


def _delete_jobset(teller: Teller) -> None:
    if teller.world.jobset is not None:
        teller.deletions += 1
        teller.world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)


def _report(teller: Teller, *, steps: int, pauses_s: tuple[int, ...]) -> None:
    for _ in range(teller.random.randint(1, 4)):
        if teller.alive():
            teller.report(steps=steps, after_s=teller.random.choice(pauses_s))


def _report_commit(teller: Teller) -> None:
    if teller.alive():
        teller.report(commits=True)


def _change_image(teller: Teller) -> None:
    container = {"name": "trainer", "image": f"trainer:{teller.random.randint(0, 2)}"}
    teller.world.edit(template={"spec": {"containers": [container]}})


def _change_interval(teller: Teller) -> None:
    interval = {"every": {"steps": teller.random.choice([50, 100])}}
    teller.world.edit(checkpoint={"uri": "gs://bucket/runs/lm", "interval": interval})


def _ask_for_a_restart(teller: Teller) -> None:
    value = teller.random.choice(["1", "2", None])
    if value is not None and value != teller.asked_value:
        teller.asked, teller.asked_value = teller.asked + 1, value
    teller.world.annotate(RESTART_ANNOTATION, value)


def _take_capacity(teller: Teller) -> None:
    """Evict a pod, and let none start until there is capacity again: not for a quarter of an hour at least."""
    if not teller.on_machines:
        teller.world.controllers.gone.update(("n1", "n2", "n3", "n4"))
        teller.disrupt_one("EvictionByEvictionAPI", 143)
        teller.world.controllers.sync()
        teller.world.now += 900


def _restart_operator(teller: Teller) -> None:
    teller.unseen = True
    teller.world.restart_operator()


def _operator_away(teller: Teller) -> None:
    teller.unseen = True
    teller.world.stop_operator()
    teller.world.controllers.sync()
    if teller.random.random() < 0.5:
        HAPPENINGS[teller.random.choice(_WHILE_AWAY)](teller)
        teller.world.now += teller.random.choice([1, 30])
        teller.world.controllers.sync()
    teller.world.restart_operator()


def _delay_watches(teller: Teller) -> None:
    teller.unseen = True
    kinds = ["pods", "jobs", "jobsets", "workloads"]
    teller.world.delay_watches(*teller.random.sample(kinds, teller.random.randint(1, 2)))


def _lose_node(teller: Teller) -> None:
    if not teller.world.controllers.stuck and not teller.on_machines:
        teller.world.lose_node(teller.random.choice(("n1", "n2", "n3", "n4")))


def _change_machines(teller: Teller) -> None:
    """Let a job's machines go, come back, or be others; or let a kubelet say nothing."""
    if not teller.on_machines:
        return
    what = teller.random.choice(["Suspended", "Active", "silence", "back", "others"])
    if what in {"Suspended", "Active"}:
        teller.lose_machines(what)
    elif what == "silence":
        teller.world.controllers.stuck.add(teller.random.choice(("n1", "n2")))
    else:
        teller.return_machines("uid-a" if what == "back" else "uid-b")


def _pass(seconds: int) -> Happening:
    return lambda teller: setattr(teller.world, "now", teller.world.now + seconds)


_WHILE_AWAY: Final = (
    "a trainer fails",
    "a trainer is done",
    "a trainer saves and stops alone",
    "a pod is evicted",
    "a job is deleted",
    "kueue evicts the job",
)
HAPPENINGS: Final[dict[str, Happening]] = {
    "a trainer fails": lambda teller: teller.end_one(1),
    "a trainer fails again": lambda teller: teller.end_one(1),
    "a trainer is killed": lambda teller: teller.end_one(143),
    "a trainer is fenced": lambda teller: teller.end_one(int(ExitCode.FENCED)),
    "two trainers fail at once": _two_fail,
    "a trainer is done": lambda teller: teller.end_one(
        0, "", termination_message(ExitCode.DONE, step=teller.step)
    ),
    "all trainers are done": _all_are_done,
    "a trainer saves and stops alone": lambda teller: teller.end_one(
        _SAVED, "", saved_message(sequence=7, step=1), _BY_PEER
    ),
    "a trainer fails and its peer saves": _one_fails_and_its_peer_saves,
    "all save and stop": _all_save,
    "a pod is evicted": lambda teller: teller.disrupt_one(
        "EvictionByEvictionAPI", teller.random.choice([143, None])
    ),
    "a machine is taken back": lambda teller: teller.disrupt_one("TerminationByKubelet", _SAVED),
    "a pod is deleted": _delete_pod,
    "a job is deleted": _delete_job,
    "the jobset is deleted": _delete_jobset,
    "jobs notice failures": lambda teller: teller.world.controllers.notice_failures(),
    "a commit is reported": _report_commit,
    "another commit is reported": _report_commit,
    "steps are reported": lambda teller: _report(teller, steps=1, pauses_s=(10, 10, 300)),
    "the step stands still": lambda teller: _report(teller, steps=0, pauses_s=(10, 1000)),
    "the training hangs": lambda teller: teller.report(after_s=10, hang=HANG),
    "the training hangs again": lambda teller: teller.report(after_s=10, hang=HANG),
    "the job is suspended": lambda teller: teller.world.edit(suspend=True),
    "the job is resumed": lambda teller: teller.world.edit(suspend=False),
    "the job is resumed again": lambda teller: teller.world.edit(suspend=False),
    "the image is changed": _change_image,
    "the interval is changed": _change_interval,
    "a restart is asked for": _ask_for_a_restart,
    "a restart is asked for again": _ask_for_a_restart,
    "there is no capacity": _take_capacity,
    "there is no capacity for longer": _take_capacity,
    "there is capacity again": lambda teller: teller.return_capacity(),
    "the spec is refused": lambda teller: teller.world.edit(**teller.random.choice(_REFUSED)),
    "the spec is right again": lambda teller: teller.mend_the_spec(),
    "kueue evicts the job": lambda teller: teller.world.controllers.kueue.evict(
        "Preempted", "a workload with a higher priority needs the quota"
    ),
    "kueue has quota": lambda teller: setattr(teller.world.controllers.kueue, "quota", True),
    "the operator is restarted": _restart_operator,
    "the operator is away": _operator_away,
    "watches are late": _delay_watches,
    "watches are delivered": lambda teller: teller.world.deliver_watches(),
    "a node is lost": _lose_node,
    "machines change": _change_machines,
    "machines change again": _change_machines,
    "machines change once more": _change_machines,
    "half a minute passes": _pass(30),
    "an hour passes": _pass(3600),
}
