"""kubectl as a child process: one answer, or lines as they come."""

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Kubectl", "KubectlError"]

_TIMEOUT_S = 60


class KubectlError(RuntimeError):
    """Raised when kubectl fails; the message is its error output."""


@dataclass(slots=True, kw_only=True)
class Kubectl:
    environment: Mapping[str, str]
    """Names the cluster (KUBECONFIG), and where kubectl is (PATH)."""

    namespace: str = "default"
    _streams: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output.

        Raises:
            KubectlError: It failed, or didn't end.

        """
        try:
            done = subprocess.run(
                self._command(words),
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
                env=self._environment(),
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {' '.join(words)}: no end within {_TIMEOUT_S} s") from error
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def lines(self, *words: str) -> Iterator[str]:
        """Whole lines until kubectl ends, or `close` ends it: where the API server dies, the last one may be cut."""
        with self._lock:
            if self._closed:
                return
            # A session of its own: Ctrl-C reaches this program, which then ends its children.
            stream = subprocess.Popen(
                self._command(words),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            self._streams.add(stream)
        with stream:
            assert stream.stdout is not None
            yield from (line for line in stream.stdout if line.endswith("\n"))
        with self._lock:
            self._streams.discard(stream)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop all streams of lines, and start no more."""
        with self._lock:
            self._closed = True
            for stream in self._streams:
                stream.kill()

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return ["kubectl", f"--namespace={self.namespace}", *words]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}
