"""Play stories: steps in words that change a job's world, and checks of its status, as rows of tables."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import pytest

from fake_cluster.kubelets import saved_message, termination_message, training_report
from fake_cluster.world import Reconciled, World
from stepkeeper_operator.api.v1alpha1.conditions import Phase

Step = Callable[..., object]


def table(names: str, rows: Mapping[str, tuple[object, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], rows.values(), ids=rows)


def stories(rows: Mapping[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("story", rows.values(), ids=rows)


async def run_job(*, spot: bool = False, **spec: Any) -> World:
    """Make a world in which the pods of its job run. `spec` overrides or adds fields of the spec."""
    world = World(spot=spot, **spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def fail(world: World, code: int = 1, *, index: int = 0, said: int | None = None, error: str = "") -> None:
    """End a pod with that code. Its training may have reported another code, and an error."""
    message = termination_message(said or code, error=error) if said or error else ""
    world.controllers.end_pod(world.pods[index], code, message=message)


def end_pods(world: World, code: int, **reported: object) -> None:
    """End all pods with that code, and with termination messages of these fields if any are given."""
    message = termination_message(code, **reported) if reported else ""
    for pod in world.pods:
        world.controllers.end_pod(pod, code, message=message)


def fail_behind_a_peer(world: World) -> None:
    """Let one pod fail, and the other save first since its peer stops: JobSet counts no failure."""
    end_pods(world, 75, notice="peer", step=120)
    fail(world, index=1, error="ValueError: bad")


def disrupt(world: World, reason: str = "EvictionByEvictionAPI") -> None:
    """Disrupt the first pod, which the signal kills."""
    world.controllers.disrupt(world.pods[0], reason)
    world.controllers.end_pod(world.pods[0], 143)


def mark_deleted(world: World, plural: str, name: str = "lm", grace_s: float = 0) -> None:
    """Request the deletion of an object, as kubectl would."""
    world.cluster.mark_deleted(plural, "default", name, grace_s=int(grace_s))


def delete_pods(world: World, grace_s: float = 0) -> None:
    for pod in world.pods:
        mark_deleted(world, "pods", pod["metadata"]["name"], grace_s)


def count_restarts(world: World) -> dict[str, tuple[int, int]]:
    """Return how many restarts each cause had, and how many of these count towards a limit."""
    counts = world.status.restarts.by_cause
    return {each.cause: (each.count, each.counted_towards_limit) for each in counts if each.count}


async def play_steps(world: object, story: str, steps: Mapping[str, Step]) -> None:
    """Play a story: steps with commas between, each the name of a step and its arguments."""
    for number, step in enumerate(story.split(", "), start=1):
        name, *words = step.split()
        try:
            done = steps[name](world, *words)
            if isinstance(done, Awaitable):
                await done
        except AssertionError as error:
            raise AssertionError(f"step {number}, {step!r}: {error}") from error


async def play(world: World, story: str, **own: Step) -> World:
    """Play a story of a job with the steps of this module and the test's own, and return its world."""
    await play_steps(world, story, STEPS | own)
    return world


def same(found: object, wanted: object) -> None:
    """Check the expected value of a step."""
    assert found == wanted, f"it is {found!r}"


def _stop(world: World, seconds: str, code: str) -> None:
    kubelets = world.controllers.kubelets
    kubelets.stop_s, kubelets.stop_code = float(seconds), int(code)
    kubelets.stop_message = saved_message(sequence=7, step=120) if code == "75" else ""


def _lose_status(world: World) -> None:
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", {key: raw[key] for key in raw if key != "status"})


def _condition(world: Reconciled, kind: str, found: str) -> None:
    status, reason = world.condition(kind) or ("", "none")
    same(f"{status}/{reason}", found)


def _message(world: Reconciled, kind: str, *words: str) -> None:
    message = world.message(kind)
    assert " ".join(words) in message, message


async def _rest(world: Reconciled) -> None:
    same(await world.record_writes(rounds=3), [])


def _costs(world: World, *costs: str) -> None:
    found = {f"{cause}={count}/{towards}" for cause, (count, towards) in count_restarts(world).items()}
    same(found, set(costs))


EDITS: Final[dict[str, dict[str, Any]]] = {
    "image new": {"template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}},
    "image typo": {"template": {"spec": {"containers": [{"name": "trainer", "image": "typo:2"}]}}},
    "interval 50": {"checkpoint": {"uri": "gs://bucket/runs/lm", "interval": {"every": {"steps": 50}}}},
    "ttl soon": {"ttlSecondsAfterFinished": "soon"},
}
ANY_STEPS: Final[dict[str, Step]] = {
    "look": lambda world: world.reconcile(),
    "wait": lambda world, seconds: setattr(world, "now", world.now + float(seconds)),
    "restart": lambda world: world.restart_operator(),
    "condition": _condition,
    "message": _message,
    "events": lambda world, reason, count: same(world.events.count(reason), int(count)),
    "rests": _rest,
}
"""The steps and checks for objects of every kind."""

STEPS: Final[dict[str, Step]] = ANY_STEPS | {
    "run": lambda world, rounds="12": world.run_until_settled(rounds=int(rounds)),
    "act": lambda world: world.controllers.sync(),
    "fail": lambda world, code="1", index="0": fail(world, int(code), index=int(index)),
    "end": lambda world, code: end_pods(world, int(code)),
    "stop": _stop,
    "preempt": lambda world: world.preempt(),
    "evict": disrupt,
    "disrupt": lambda world, index, reason: world.controllers.disrupt(world.pods[int(index)], reason),
    "suspend": lambda world: world.edit(suspend=True),
    "resume": lambda world: world.edit(suspend=False),
    "edit": lambda world, field, value: world.edit(**EDITS[f"{field} {value}"]),
    "limit": lambda world, name, value: world.edit(
        restarts=world.job.spec.restarts.to_raw() | {name: int(value)}
    ),
    "delete": mark_deleted,
    "remove": lambda world, plural, name="lm": world.cluster.remove(plural, "default", name),
    "delete-pods": delete_pods,
    "delete-job": lambda world: world.controllers.delete_job("lm-w-0"),
    "away": lambda world: world.stop_operator(),
    "late": lambda world, *plurals: world.delay_watches(*plurals),
    "deliver": lambda world: world.deliver_watches(),
    "hear": lambda world: world.cache.record_jobset(world.jobset, deleted=False),
    "lose": lambda world, node: world.lose_node(node),
    "stick": lambda world, node: world.controllers.stuck.add(node),
    "unstick": lambda world: world.controllers.stuck.clear(),
    "quota": lambda world: setattr(world.controllers.kueue, "quota", True),
    "report": lambda world, number, step: world.receive_report(training_report(int(number), int(step))),
    "lose-status": _lose_status,
    "accept": lambda world: world.cluster.refusals.clear(),
    "phase": lambda world, phase: same(world.phase(), phase),
    "causes": lambda world, *causes: same([each or "-" for each in world.causes], [*causes]),
    "costs": _costs,
    "latest": lambda world, number, step: same(world.latest, (int(number), int(step))),
    "pods": lambda world, count: same(len(world.pods), int(count)),
    "inferred": lambda world, *found: same(
        [str(bool(each.inferred)) for each in world.status.attempts], [*found]
    ),
    "jobsets": lambda world, count: same(world.status.operator.job_sets, int(count)),
    "step": lambda world, step: same(world.status.attempts[-1].to_step, int(step)),
    "restarts": lambda world, count: same(world.jobset["status"]["restarts"], int(count)),
    "starts": lambda world, count: same(world.status.operator.starts_without_checkpoint, int(count)),
    "attempts": lambda world, count: same(len(world.causes), int(count)),
    "gone": lambda world: same(world.jobset, None),
    "suspended": lambda world: same(world.jobset["spec"]["suspend"], True),
    "resumed": lambda world: same(world.jobset["spec"]["suspend"], False),
}
"""The steps and checks for a job."""
