"""What stands in the place of a symbol once its mechanism is taken out. Each function is given the symbol's value."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override


def answer(value: object) -> Callable[[Any], Any]:
    """Do nothing, and return `value`."""
    return lambda _: lambda *_args, **_kwargs: value


def become(value: object) -> Callable[[Any], Any]:
    return lambda _: value


class Alike(int):
    """A checksum, or several, that no other differs from."""

    __hash__ = int.__hash__

    @override
    def __eq__(self, _: object) -> bool:
        return True

    @override
    def __ne__(self, _: object) -> bool:
        return False

    def __getitem__(self, _: object) -> "Alike":
        return self


def without_fsync(real: ModuleType) -> Any:
    class Os(ModuleType):
        @override
        def __getattr__(self, name: str) -> Any:
            return (lambda _: None) if name == "fsync" else getattr(real, name)

    return Os("os")


def replace_what_is_there(_: Any) -> Any:
    def link(_: Any, temporary: Path, target: Path) -> bool:
        if target.exists():
            return False
        time.sleep(0.01)
        temporary.replace(target)
        return True

    return link


def without_condition_on_entries(blob_of: Any) -> Any:
    def blob(store: Any, path: str) -> Any:
        real = blob_of(store, path)
        upload = real.upload_from_string
        real.upload_from_string = lambda data, **how: upload(data, **how | {"if_generation_match": None})
        return real

    return blob


def without_condition_on_data(encode: Any) -> Any:
    return lambda query: encode({name: value for name, value in query.items() if name != "ifGenerationMatch"})


def forget_pending(_: Any) -> Any:
    def settle(log: Any) -> None:
        log._pending = None

    return settle


def let_older_starts_claim(check: Any) -> Any:
    def check_owner(state: Any, owner: Any, take_over: Any) -> None:
        from stepkeeper.errors import FencedError

        try:
            check(state, owner, take_over)
        except FencedError:
            return

    return check_owner


def begin_from_nothing(resolve: Any) -> Any:
    def resolve_base(*args: Any, **kwargs: Any) -> Any:
        from stepkeeper.errors import RestoreError

        try:
            return resolve(*args, **kwargs)
        except RestoreError:
            return None

    return resolve_base


def commit_with_those_who_wrote(commit: Any) -> Any:
    def commit_or_void(job: Any, companion: Any, process: Any, place: Any, votes: Any, **how: Any) -> Any:
        return commit(job, companion, process, place, [vote for vote in votes if "error" not in vote], **how)

    return commit_or_void


def take_all_for_verified(choose: Any) -> Any:
    return lambda state, policy, _=(), times=None: choose(state, policy, set(state.commits), times)


def delete_data_first(delete: Any) -> Any:
    def delete_commits(log: Any, claim: Any, choose: Any) -> Any:
        for slot in choose(log.state):
            for stat in log._store.list(log.state.commits[slot].folder):
                log._store.delete(stat.path)
        return delete(log, claim, choose)

    return delete_commits


def reuse_layout(get: Any) -> Any:
    def get_layout(cache: Any, order: Any, **how: Any) -> Any:
        return get(cache, order, **how) if cache._layout is None else cache._layout[1]

    return get_layout


def overlook_ends(_: Any) -> Any:
    def listen(_links: Any, _rank: int, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.recv(1)

    return listen


def note_whatever_was_read(note: Any) -> Any:
    def note_restored(restore: Any, commit: Any) -> Any:
        restore._restorer.used_cache = False
        return note(restore, commit)

    return note_restored
