"""Strategies for the contents of a pickle."""

from typing import Any

from typing_extensions import override


class Reduced:
    """Is pickled as this call, with what may follow it."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    @override
    def __reduce__(self) -> Any:
        return self.parts
