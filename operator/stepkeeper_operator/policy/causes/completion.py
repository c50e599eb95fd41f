"""Find out that the training of an attempt is done, however other containers or the cluster ended its pods."""

from stepkeeper.contract import ExitCode
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.policy.causes.finding import NO_CAUSE, Finding
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.pod_ends import describe_other_failure

__all__ = ["check_done"]


def check_done(pods: tuple[Pod, ...], circumstances: Circumstances) -> Finding | None:
    """Check for trainers on all hosts that exited 0 and said that the training is done: no restart helps then.

    The newest pod of each rank counts, also of ranks that an edit of the number of hosts has left out since.
    """
    newest = {pod.rank: pod for pod in sorted(pods, key=lambda pod: pod.created_at)}
    if len(newest) < circumstances.n_hosts or not all(map(_said_done, newest.values())):
        return None
    message = "every trainer exited 0 and said that the training is done"
    others = [describe_other_failure(pod) for pod in pods if pod.other_failure is not None]
    return Finding(cause=NO_CAUSE, message="; ".join([message, *others[:1]]))


def _said_done(pod: Pod) -> bool:
    """Return True if the trainer exited 0 and said that the training is done, with no notice to stop before that."""
    said = pod.termination
    return pod.exit_code == 0 and said is not None and said.code == ExitCode.DONE and said.notice is None
