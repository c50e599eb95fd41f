# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Receive the training's reports, at an address that only this machine reaches, with a token that only the run has."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final

from stepkeeper.contract import ContractError, Directive, Report
from stepkeeper.contract.report import REPORT_LIMIT_BYTES

__all__ = ["REPORT_INTERVAL_S", "ReportEndpoint"]

REPORT_INTERVAL_S: Final = 1


class ReportEndpoint(AbstractContextManager["ReportEndpoint"]):
    """Pass each report to `on_report`, with the attempt that its address names. A thread serves until the exit."""

    def __init__(self, token: str, on_report: Callable[[int, Report], None]) -> None:
        answer = Directive(report_interval_s=REPORT_INTERVAL_S).to_json()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if self.headers.get("Authorization") != f"Bearer {token}":
                    self.send_error(HTTPStatus.UNAUTHORIZED)
                elif not length.isdecimal() or int(length) > REPORT_LIMIT_BYTES:
                    self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                else:
                    self._take(self.rfile.read(int(length)))

            def _take(self, body: bytes) -> None:
                try:
                    attempt, report = int(self.path.removeprefix("/")), Report.from_json(body)
                except (ContractError, ValueError) as error:
                    self.send_error(HTTPStatus.BAD_REQUEST, str(error))
                    return
                on_report(attempt, report)
                self.send_response(HTTPStatus.OK)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                """Log nothing: the terminal has the run's own lines."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="reports", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url_of(self, attempt: int) -> str:
        """Return the address for the reports of an attempt."""
        return f"http://127.0.0.1:{self._server.server_port}/{attempt}"
