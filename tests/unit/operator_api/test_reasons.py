"""Test that docs/operations/conditions.md lists the conditions of both kinds, and every reason that they can have."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    ResourceOperatorState,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import OperatorState

PAGE: Final = Path(__file__).parents[3] / "docs/operations/conditions.md"
_ROW: Final = re.compile(r"^\| (\w*) \| ((?:True|False|Unknown)[, \w]*) \| ([\w, ]+) \| .+ \|$", re.MULTILINE)
_MOST_FIELDS: Final = 10


def rows() -> Iterator[tuple[str, str]]:
    condition = ""
    for match in _ROW.finditer(PAGE.read_text(encoding="utf-8")):
        condition = match[1] or condition
        yield from ((condition, reason) for reason in match[3].split(", "))


def test_the_page_lists_each_reason_and_no_other() -> None:
    assert {reason for _, reason in rows()} == set(Reason)


def test_the_page_lists_each_condition_and_no_other() -> None:
    assert {condition for condition, _ in rows()} == {*ConditionType, *QueuedResourceConditionType}


def test_a_reason_of_another_version_is_unknown_and_each_state_is_a_reason() -> None:
    assert Reason("Repaired") is Reason.UNKNOWN
    assert [Reason(state.value).value for state in QueuedResourceState] == list(QueuedResourceState)


def test_the_private_state_of_the_operator_is_small() -> None:
    assert max(len(kind.model_fields) for kind in (OperatorState, ResourceOperatorState)) <= _MOST_FIELDS
