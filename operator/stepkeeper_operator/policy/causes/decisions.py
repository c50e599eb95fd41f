"""Tell in an attempt's message what its training chose to save in the time that it had left."""

from collections.abc import Iterable

from stepkeeper_operator.facts import Pod

__all__ = ["add_decision"]


def add_decision(message: str, pods: Iterable[Pod], *, behind: str = "; ") -> str:
    """Add to the message what the first of the pods that says so chose to save. What is in it isn't added again."""
    said = (pod.termination.decision for pod in pods if pod.termination is not None)
    decisions = [each for each in said if each is not None]
    if not decisions or any(each in message for each in decisions):
        return message
    return f"{message}{behind}{decisions[0]}"
