"""Pages of lists: by name, so that what is created or deleted between two pages moves nothing."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tpuapi.core.errors import invalid
from tpuapi.core.names import Location
from tpuapi.core.values import Json
from tpuapi.core.world import World

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    items: tuple[Item, ...]
    next_page_token: str
    unreachable: tuple[str, ...] = ()


def page_of(world: World, parent: Location, named: Sequence[tuple[str, Item]], request: Json) -> Page[Item]:
    """Cut the page that a list request asks for.

    Args:
        world: For the sizes of pages, and zones that can't be reached.
        parent: The parent of the request; a token of another parent is refused.
        named: What to list, with the names to order it by.
        request: `page_size` and `page_token` are read.

    Raises:
        ApiError: The size is negative, or the token is none of this list; INVALID_ARGUMENT.
    """
    size = int(request.get("page_size", 0))
    if size < 0:
        raise invalid("page_size", f"{size} is negative")
    size = min(size or world.habits.default_page_size, world.habits.max_page_size)
    after = _name_of(request.get("page_token", ""), parent)
    ordered = sorted((pair for pair in named if pair[0] > after), key=lambda pair: pair[0])
    shown = ordered[:size]
    token = _token(parent, shown[-1][0]) if len(ordered) > size else ""
    unreachable = sorted(world.unreachable) if parent.zone == "-" else ()
    return Page(tuple(item for _, item in shown), token, tuple(unreachable))


def _token(parent: Location, name: str) -> str:
    return base64.urlsafe_b64encode(f"{parent.path}\n{name}".encode()).decode()


def _name_of(token: str, parent: Location) -> str:
    if not token:
        return ""
    try:
        path, _, name = base64.urlsafe_b64decode(token.encode()).decode().partition("\n")
    except (binascii.Error, UnicodeDecodeError):
        raise invalid("page_token", "it was not given by this service") from None
    if path != parent.path:
        raise invalid("page_token", f"it was given by a list of {path}")
    return name
