"""Post a report to the operator's endpoint over HTTPS, with the pod's token and without the environment's proxies."""

import http.client
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from stepkeeper.contract import ContractError, Directive

__all__ = ["EndpointError", "ReportTarget", "post_report"]

_TIMEOUT_S: Final = 5.0
_ANSWER_LIMIT_BYTES: Final = 64 * 1024


class EndpointError(OSError):
    """The operator did not take a report: it is away, or refused. Training goes on all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTarget:
    """Address that reports go to, and the files that prove the sender, which are read anew for each report."""

    url: str
    ca_file: str
    token_file: str


def post_report(target: ReportTarget, body: bytes) -> Directive:
    """Send a report, and return the directive that the operator answers with.

    Args:
        target: The operator's endpoint, and the credentials to use.
        body: The report, as JSON.

    Raises:
        EndpointError: The endpoint could not be reached, or answered with anything but 200.

    """
    parts = urlsplit(target.url)
    if parts.scheme != "https" or parts.hostname is None:
        raise EndpointError(f"the endpoint's url {target.url!r} is not https://host[:port]/path")
    try:
        token = Path(target.token_file).read_text(encoding="ascii").strip()
        context = ssl.create_default_context(cafile=target.ca_file)
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context
        )
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", parts.path or "/", body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read(_ANSWER_LIMIT_BYTES)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EndpointError(f"{target.url}: {type(error).__name__}: {error}") from error
    if response.status != http.HTTPStatus.OK:
        reason = answer[:200].decode(errors="replace")
        raise EndpointError(f"{target.url}: answered {response.status}: {reason}")
    try:
        return Directive.from_json(answer)
    except ContractError as error:
        raise EndpointError(f"{target.url}: {error}") from error
