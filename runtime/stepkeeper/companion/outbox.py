"""Send a companion's messages to its trainer, which may have stopped receiving them."""

import threading
from collections import deque
from contextlib import suppress
from typing import Any, final

from stepkeeper.companion.channel import Channel

__all__ = ["Outbox"]


@final
class Outbox:
    """Send messages without waiting for the trainer. Any thread may send.

    A trainer that hangs receives nothing, and the socket to it fills up. Reports have to go on all the same: they
    are how the operator learns of it.
    """

    def __init__(self, channel: Channel) -> None:
        """Send nothing yet.

        Args:
            channel: This end of the channel to the trainer.

        """
        self._channel = channel
        self._lock = threading.Lock()
        self._kept: deque[dict[str, Any]] = deque()

    def offer(self, message: dict[str, Any]) -> None:
        """Send a message that is of no use later. It is dropped while the trainer is behind with receiving."""
        with suppress(OSError):
            self._channel.send(message, timeout_s=0.0)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message that has to arrive. It is kept while the trainer is behind with receiving.

        The trainer makes no request while it hangs, so only a few such messages, which follow from its last requests,
        are ever kept.
        """
        with self._lock:
            if self._kept:
                self._kept.append(message)
                return
            try:
                self._channel.send(message, timeout_s=0.0)
            except TimeoutError:
                self._kept.append(message)
                threading.Thread(target=self._send_kept, name="outbox", daemon=True).start()
            except OSError:
                # The trainer is gone, and this process ends as soon as the thread that receives sees that.
                return

    def _send_kept(self) -> None:
        """Send the kept messages in order, however long the trainer takes."""
        while True:
            with suppress(OSError):  # as above
                self._channel.send(self._kept[0])
            with self._lock:
                self._kept.popleft()
                if not self._kept:
                    return
