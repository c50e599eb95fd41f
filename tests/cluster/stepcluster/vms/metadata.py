"""Serve one virtual machine's metadata, as Compute Engine's metadata server does.

Run as `python -m stepcluster.vms.metadata HOST:PORT FILE`. FILE holds the attributes as a JSON object; it is read for
each request.
"""

import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override

ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"
FLAVOR = ("Metadata-Flavor", "Google")
"""Header without which nobody is answered: what a browser or a proxy was talked into asking lacks it."""


class MetadataServer(ThreadingHTTPServer):
    """Answers for the attributes in a file, a JSON object; at port 0 it takes a free one."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], file: Path) -> None:
        super().__init__(address, _Handler)
        self._file = file

    @property
    def address(self) -> str:
        """The value of GCE_METADATA_HOST."""
        return f"{self.server_address[0]!s}:{self.server_address[1]}"

    def read(self) -> Mapping[str, str]:
        values: Mapping[str, str] = json.loads(self._file.read_text(encoding="utf-8"))
        return values


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        """Answer with an attribute, or with the list of all."""
        if self.headers.get(FLAVOR[0]) != FLAVOR[1]:
            self._answer(403, f"Missing {FLAVOR[0]}:{FLAVOR[1]} header.\n")
            return
        text = self._find(self.path.partition("?")[0])
        self._answer(*((404, f"{self.path} was not found.\n") if text is None else (200, text)))

    def _find(self, path: str) -> str | None:
        if path == ATTRIBUTES:
            return "".join(f"{key}\n" for key in sorted(self.server.read()))
        return self.server.read().get(path.removeprefix(ATTRIBUTES)) if path.startswith(ATTRIBUTES) else None

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header(*FLAVOR)
        self.send_header("Content-Type", "application/text")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        print(f"{self.path}: {args[1] if len(args) > 1 else format}", flush=True)


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    MetadataServer((host, int(port)), Path(sys.argv[2])).serve_forever()
