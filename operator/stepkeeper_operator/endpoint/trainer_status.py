"""Read the posts of transformers' KubeflowCallback, and of other programs that report to Kubeflow Trainer."""

from itertools import islice

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from stepkeeper.contract.report import MAX_METRICS
from stepkeeper_operator.cache.reports import TrainerStatus
from stepkeeper_operator.endpoint.report_checks import keep_visible
from stepkeeper_operator.errors import ReportRefusedError

__all__ = ["read_trainer_status"]


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", strict=True)


class _Metric(_Part):
    name: str
    value: str


class _Status(_Part):
    progress_percentage: int | None = Field(None, ge=0, le=100)
    estimated_remaining_seconds: int | None = Field(None, ge=0, le=2**53)
    metrics: list[_Metric] = []


class _Body(_Part):
    trainer_status: _Status


def read_trainer_status(body: bytes, ordinal: tuple[int, int]) -> TrainerStatus:
    """Read a post of an attempt's trainer. Of its metrics, the first 16 are kept.

    Args:
        body: The JSON object, with the key `trainerStatus`.
        ordinal: Ordinal of the attempt.

    Raises:
        ReportRefusedError: It is no such object.

    """
    try:
        status = _Body.model_validate_json(body).trainer_status
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ReportRefusedError(400, f"{where}: {first['msg']}") from error
    return TrainerStatus(
        ordinal=ordinal,
        percent=status.progress_percentage,
        remaining_s=status.estimated_remaining_seconds,
        metrics={
            keep_visible(each.name): keep_visible(each.value) for each in islice(status.metrics, MAX_METRICS)
        },
    )
