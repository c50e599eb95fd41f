"""Answer POST /v1/namespaces/{namespace}/jobs/{name}/report: a Report in, a Directive out.

/trainer-status beside it takes what trainers send to Kubeflow by themselves.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import web

from stepkeeper.contract import ContractError, Report
from stepkeeper.contract.report import REPORT_LIMIT_BYTES
from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.cache.reports import LastReport, ReportCache
from stepkeeper_operator.endpoint.authentication import ReportAuthenticator, ReportingAttempt
from stepkeeper_operator.endpoint.report_checks import check_report
from stepkeeper_operator.endpoint.trainer_status import read_trainer_status
from stepkeeper_operator.errors import ApiError, ReportRefusedError
from stepkeeper_operator.metrics import Metrics

__all__ = ["ReportEndpoint"]

_JOB_PATH: Final = "/v1/namespaces/{namespace}/jobs/{name}"

_BODY_S: Final = 5.0
"""Seconds for the body of a report. Companions wait equally long for the answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEndpoint:
    """Accept the reports of pods. `acting` returns whether this operator holds the Lease."""

    authenticator: ReportAuthenticator
    reports: ReportCache
    enqueue: Callable[[ObjectKey], None]
    acting: Callable[[], bool]
    metrics: Metrics
    clock: Callable[[], float] = time.time

    def make_app(self) -> web.Application:
        """Return the application. Serve it with TLS."""
        app = web.Application(client_max_size=REPORT_LIMIT_BYTES)
        app.router.add_post(f"{_JOB_PATH}/report", partial(self._handle_post, self._accept_report))
        accept = self._accept_trainer_status
        app.router.add_post(f"{_JOB_PATH}/trainer-status", partial(self._handle_post, accept))
        return app

    async def _handle_post(
        self, accept: Callable[[ObjectKey, web.Request], Awaitable[bytes]], request: web.Request
    ) -> web.Response:
        """Answer a post with what `accept` returns, or with the refusal as JSON."""
        key = job_key(request.match_info["namespace"], request.match_info["name"])
        try:
            answer = await accept(key, request)
        except ReportRefusedError as refusal:
            self.metrics.reports.labels(code=str(refusal.status)).inc()
            extra = {**key.log_fields, "status": refusal.status, "error": str(refusal)}
            # Anyone can begin a request and go away.
            _log.log(
                logging.DEBUG if request.transport is None else logging.INFO, "refused report", extra=extra
            )
            return web.json_response({"error": str(refusal)}, status=refusal.status)
        self.metrics.reports.labels(code="200").inc()
        return web.Response(body=answer, content_type="application/json")

    async def _authenticate(self, key: ObjectKey, request: web.Request) -> tuple[ReportingAttempt, bytes]:
        """Return the sender, and the body."""
        if not self.acting():
            text = "this operator is not the acting one, or not yet: report again later"
            raise ReportRefusedError(503, text)
        token = _read_token(request)
        # Anyone can send a body. Read it before the TokenReview, for which the sender may not wait.
        self.authenticator.check_claims(key, token)
        body = await _read_body(request)
        try:
            return await self.authenticator.authenticate(key, token), body
        except (ApiError, OSError, TimeoutError) as error:
            raise ReportRefusedError(503, f"the API server doesn't answer: {error}") from error

    async def _accept_report(self, key: ObjectKey, request: web.Request) -> bytes:
        attempt, body = await self._authenticate(key, request)
        try:
            report = Report.from_json(body)
        except ContractError as error:
            raise ReportRefusedError(400, str(error)) from error
        now = self.clock()
        checked = check_report(report, attempt.job, now=now)
        if checked.root != report.root:
            text = "left commits out of a report: they are not in spec.checkpoint.uri"
            _log.info(text, extra=key.log_fields)
        last = LastReport(report=checked, ordinal=attempt.ordinal, received_at=now, pod_uid=attempt.pod_uid)
        if self.reports.add_report(attempt.job_uid, last):
            self.enqueue(key)
        return self.reports.get_directive(attempt.job_uid).to_json()

    async def _accept_trainer_status(self, key: ObjectKey, request: web.Request) -> bytes:
        attempt, body = await self._authenticate(key, request)
        if self.reports.set_trainer_status(attempt.job_uid, read_trainer_status(body, attempt.ordinal)):
            self.enqueue(key)
        return b"{}"


def _read_token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise ReportRefusedError(401, "the Authorization header has no bearer token")
    return token.strip()


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise ReportRefusedError(408, f"the report did not arrive within {_BODY_S:.0f} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ReportRefusedError(413, f"a report has at most {REPORT_LIMIT_BYTES} bytes") from error
    except (OSError, web.RequestPayloadError) as error:
        raise ReportRefusedError(400, f"the report is incomplete: {error}") from error
