"""Test the process: settings, logs, metrics and errors."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from stepkeeper_operator.__main__ import KeyValueFormatter
from stepkeeper_operator.errors import api_error
from stepkeeper_operator.settings import OperatorSettings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPKEEPER_OPERATOR_NAMESPACE", "ops")
    monkeypatch.setenv("STEPKEEPER_OPERATOR_KUBECONFIG", "/k")
    settings = OperatorSettings()
    assert (settings.namespace, settings.kubeconfig) == ("ops", Path("/k"))
    assert settings.report_url("ns", "lm").startswith("https://stepkeeper-operator.ops.svc:8443/v1/")
    settings = OperatorSettings(endpoint_url="https://10.0.0.1:9443/")
    assert settings.report_url("ns", "lm") == "https://10.0.0.1:9443/v1/namespaces/ns/jobs/lm/report"
    assert "10.0.0.1" in settings.certificate_names()


def test_a_log_line_is_pairs_that_can_be_searched_for() -> None:
    told: dict[str, Any] = {
        "msg": "wrote %s",
        "args": ("status",),
        "levelname": "INFO",
        "job": "a/b",
        "why": "x y",
    }
    try:
        raise ValueError("broken")
    except ValueError:
        bug = {"created": 0.25, "msecs": 250, "exc_info": sys.exc_info()}
    line, *traceback = KeyValueFormatter().format(logging.makeLogRecord(told | bug)).splitlines()
    assert line == 'time=1970-01-01T00:00:00.250Z level=info event="wrote status" job=a/b why="x y"'
    assert traceback[-1] == "ValueError: broken"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lease_duration_s": 0}, "lease_duration_s"),
        ({"cloud_tpu_insecure": True}, "STEPKEEPER_OPERATOR_CLOUD_TPU_ENDPOINT"),
    ],
)
def test_a_setting_that_can_not_be_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OperatorSettings(**given)


def test_an_answer_of_the_api_server_that_is_no_json_is_an_error_too() -> None:
    assert "Bad Gateway" in str(api_error(502, b"<html>Bad Gateway", "GET", "/x"))
