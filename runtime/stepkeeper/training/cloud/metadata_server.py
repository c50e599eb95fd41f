"""Query the metadata server of a Google Cloud machine for the cloud's announcements.

The paths and answers are those of https://cloud.google.com/compute/docs/metadata/querying-metadata. No proxy is used:
the server is the machine's own.
"""

import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlencode

__all__ = ["MetadataServer", "MetadataValue", "find_metadata_host"]

_ADDRESS: Final = "169.254.169.254"
_HOST_VARIABLE: Final = "GCE_METADATA_HOST"
"""The variable with another address of the server, which Google's own libraries read too."""

_PRODUCT_FILE: Final = Path("/sys/class/dmi/id/product_name")
_FLAVOR_HEADER: Final = "Metadata-Flavor"
_FLAVOR: Final = "Google"
_ANSWER_S: Final = 10.0
"""The seconds that an answer may take beyond the requested wait."""

_LIMIT_BYTES: Final = 65536
_QUIET: Final = "no notifications have been received"
"""Part of the answer 503 of a working server that has had no upcoming-maintenance since its start."""


class MetadataValue(NamedTuple):
    """The value of a key, and its tag for a later request."""

    text: str | None
    """None if this server doesn't have the key."""

    etag: str
    is_quiet: bool = False
    """True if the server has no notice under this key. This doesn't withdraw an earlier one."""


def find_metadata_host(environ: Mapping[str, str], product_file: Path = _PRODUCT_FILE) -> str | None:
    """Return host[:port] of the metadata server; None if this isn't a machine of Google Cloud.

    GCE_METADATA_HOST names another server, as in Google's libraries. Otherwise the firmware's product name counts.
    """
    if given := environ.get(_HOST_VARIABLE):
        return given
    try:
        product = product_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return _ADDRESS if product.startswith("Google") else None


class MetadataServer:
    """Read keys of one machine. Each call has a connection of its own, so any thread may call."""

    def __init__(self, host: str, *, answer_s: float = _ANSWER_S) -> None:
        """Store the address. A whole answer may take `answer_s` beyond the requested wait."""
        self._host = host
        self._answer_s = answer_s

    def wait_for_change(self, key: str, etag: str | None, timeout_s: float) -> MetadataValue:
        """Return a key's value once its tag isn't `etag`, or after `timeout_s`. Raises OSError."""
        query = {"alt": "json" if key == "upcoming-maintenance" else "text"}
        # Without a tag, from an earlier answer, the server answers at once.
        if etag is not None:
            query |= {"wait_for_change": "true", "timeout_sec": str(int(timeout_s)), "last_etag": etag}
        limit_s = self._answer_s + (0.0 if etag is None else timeout_s)
        connection = http.client.HTTPConnection(self._host, timeout=limit_s)
        try:
            path = f"/computeMetadata/v1/instance/{key}?{urlencode(query)}"
            connection.request("GET", path, headers={_FLAVOR_HEADER: _FLAVOR})
            with _cut_off(connection, limit_s) as is_cut:
                answer = connection.getresponse()
                text = answer.read(_LIMIT_BYTES).decode("utf-8", "replace").strip()
            if is_cut.is_set():
                raise OSError(f"{self._host} took longer than {limit_s:.0f} s to answer for {key}")
            if answer.getheader(_FLAVOR_HEADER) != _FLAVOR:
                raise OSError(f"{self._host} is not a metadata server of Google Cloud")
            if answer.status == http.HTTPStatus.NOT_FOUND:
                return MetadataValue(None, "")
            if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE and _QUIET in text:
                return MetadataValue("", "", is_quiet=True)
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"{self._host} answered {answer.status} for {key}: {text[:100]}")
            return MetadataValue(text, answer.getheader("ETag") or "")
        except http.client.HTTPException as error:
            raise OSError(f"{self._host} did not answer as a metadata server does: {error!r}") from error
        finally:
            connection.close()


@contextmanager
def _cut_off(connection: http.client.HTTPConnection, limit_s: float) -> Iterator[threading.Event]:
    """Cut a connection off after a time, and then set the event that this yields.

    Its own timeout is for each piece of an answer, which may come byte by byte.
    """
    sock, is_cut = connection.sock, threading.Event()

    def cut() -> None:
        is_cut.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield is_cut
    finally:
        timer.cancel()
