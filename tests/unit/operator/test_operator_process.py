"""Test the process: settings, logs, metrics and errors."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper_operator.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    InvalidObjectError,
    api_error,
)
from stepkeeper_operator.logs import KeyValueFormatter
from stepkeeper_operator.settings import OperatorSettings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPKEEPER_OPERATOR_NAMESPACE", "ops")
    monkeypatch.setenv("STEPKEEPER_OPERATOR_KUBECONFIG", "/k")
    settings = OperatorSettings()
    assert (settings.namespace, settings.kubeconfig) == ("ops", Path("/k"))
    assert settings.report_url("ns", "lm").startswith(
        "https://stepkeeper-operator.ops.svc:8443/v1/namespaces/ns/"
    )


def test_an_endpoint_elsewhere_is_in_the_certificate_and_in_the_url() -> None:
    settings = OperatorSettings(endpoint_url="https://10.0.0.1:9443/")
    assert settings.report_url("ns", "lm") == "https://10.0.0.1:9443/v1/namespaces/ns/jobs/lm/report"
    assert "10.0.0.1" in settings.certificate_names()


def test_a_setting_out_of_its_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="lease_duration_s"):
        OperatorSettings(lease_duration_s=0)


def test_plaintext_goes_to_a_named_server_only() -> None:
    with pytest.raises(ValueError, match="STEPKEEPER_OPERATOR_CLOUD_TPU_ENDPOINT"):
        OperatorSettings(cloud_tpu_insecure=True)
    assert OperatorSettings(cloud_tpu_insecure=True, cloud_tpu_endpoint="10.0.0.1:8470").cloud_tpu_insecure


def test_a_log_line_is_pairs_that_can_be_searched_for() -> None:
    record = logging.makeLogRecord(
        {
            "msg": "wrote %s",
            "args": ("status",),
            "levelname": "INFO",
            "created": 0.25,
            "msecs": 250,
            "job": "a/b",
            "why": "x y",
        }
    )
    line = KeyValueFormatter().format(record)
    assert line == 'time=1970-01-01T00:00:00.250Z level=info event="wrote status" job=a/b why="x y"'


def test_a_log_line_of_a_bug_has_its_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.makeLogRecord({"msg": "m", "levelname": "ERROR", "exc_info": sys.exc_info()})
    assert "ValueError: broken" in KeyValueFormatter().format(record)


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (409, "AlreadyExists", AlreadyExistsError),
        (409, "Conflict", ConflictError),
        (422, "Invalid", InvalidObjectError),
        (403, "Forbidden", ApiError),
        (500, "", ApiError),
    ],
)
def test_an_answer_of_the_api_server_becomes_an_error_that_names_the_request(
    status: int, reason: str, kind: type[ApiError]
) -> None:
    body = f'{{"reason":"{reason}","message":"because"}}'.encode()
    error = api_error(status, body, "PUT", "/api/v1/x")
    assert type(error) is kind
    assert str(error) == " ".join(f"PUT /api/v1/x: {status} {reason} because".split())


def test_an_answer_that_is_no_json_is_an_error_too() -> None:
    assert "Bad Gateway" in str(api_error(502, b"<html>Bad Gateway", "GET", "/x"))


def test_the_operator_needs_no_torch() -> None:
    code = "import sys, stepkeeper_operator.startup; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
