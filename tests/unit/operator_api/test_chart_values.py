"""Test that the chart's values and the operator's settings have the same names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.settings import OperatorSettings

CHART = Path(__file__).parents[3] / "charts/stepkeeper"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def field_of(value_name: str) -> str:
    """Convert reportIntervalSeconds to report_interval_s, as the Deployment's template does."""
    return re.sub(r"_seconds$", "_s", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", value_name).lower())


OF_THE_CHART_ALONE = {"credentialsSecret", "startupScriptSecrets", "tokenAudience", "uninstallCheck"}
CLOUD = {
    f"cloud_tpu_{field_of(name)}": value
    for name, value in VALUES["cloudTPU"].items()
    if name not in OF_THE_CHART_ALONE
}
GENERAL = {field_of(name): value for name, value in VALUES["settings"].items()}


@pytest.mark.parametrize("name", [*GENERAL, *CLOUD])
def test_each_value_is_a_setting_with_the_same_default(name: str) -> None:
    assert (OperatorSettings.model_fields[name].default or "") == ((GENERAL | CLOUD)[name] or "")


def test_each_setting_for_cloud_tpu_is_a_value() -> None:
    assert {name for name in OperatorSettings.model_fields if name.startswith("cloud_tpu_")} == set(CLOUD)


def test_all_namespaces_are_watched_by_default() -> None:
    assert OperatorSettings.model_fields["watch_namespaces"].default == tuple(VALUES["watchNamespaces"])


def test_active_resources_are_looked_at_while_a_loss_still_explains_failures() -> None:
    bounds = SCHEMA["properties"]["cloudTPU"]["properties"]["idlePollSeconds"]
    slowest = OperatorSettings(cloud_tpu_idle_poll_s=bounds["maximum"])
    pace_s = CloudSettings.from_settings(slowest).poll_active_s
    assert pace_s < slowest.reattribution_s
    assert 1.1 * bounds["maximum"] < slowest.reattribution_s
    with pytest.raises(ValidationError):
        OperatorSettings(cloud_tpu_idle_poll_s=bounds["maximum"] + 1)


@pytest.mark.parametrize(("idle_s", "least_s"), [(1, 2), (7, 9), (55, 66), (100, 120)])
def test_the_operator_refuses_to_see_losses_later_than_they_explain_failures(
    idle_s: int, least_s: int
) -> None:
    OperatorSettings(cloud_tpu_enabled=True, cloud_tpu_idle_poll_s=idle_s, reattribution_s=least_s)
    with pytest.raises(ValidationError, match=f"at least {least_s}"):
        OperatorSettings(cloud_tpu_enabled=True, cloud_tpu_idle_poll_s=idle_s, reattribution_s=least_s - 1)
    OperatorSettings(cloud_tpu_idle_poll_s=idle_s, reattribution_s=0)  # no cloud is read


def test_the_schema_of_the_values_knows_every_value() -> None:
    assert set(SCHEMA["properties"]) == set(VALUES) | {"global"}
    for name, value in VALUES.items():
        inner = SCHEMA["properties"][name].get("properties")
        if inner is not None:
            assert set(inner) == set(value), name
