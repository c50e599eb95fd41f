"""Share the reading of a checkpoint: one of the ranks that need a block reads it, and sends it to the others."""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from stepkeeper.checkpoint.blocks import Contents, encode_runs
from stepkeeper.coordination.peer_links import neighbors
from stepkeeper.coordination.rank_group import RankGroup, StoreRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError, TornCheckpointError
from stepkeeper.links.joining import addresses_of_host
from stepkeeper.loggers import logger
from stepkeeper.restore.filling import Filling
from stepkeeper.restore.peers.duties import Duties, Sharing
from stepkeeper.restore.peers.links import Links

__all__ = ["Exchange", "exchange_among"]

_log: Final = logger(__name__)
T = TypeVar("T")


class Exchange:
    """Exchange manifests and blocks between this rank and the others. Without `links` each rank reads for itself."""

    def __init__(
        self,
        rank_group: RankGroup,
        links: Links | None = None,
        addresses: Sequence[Any] = (),
        *,
        waits: Waits | None = None,
    ) -> None:
        self._waits = waits or Waits()
        self.rank_group: Final = rank_group
        self.links = links
        self._addresses = addresses
        self.is_awaited = False
        """True while the other ranks wait for this one, which then can't send them its error."""

    def share_manifests(
        self, read: Callable[[], Sequence[bytes]], prove: Callable[[Sequence[bytes]], T]
    ) -> T:
        """Return what `prove` returns for the manifests, which only rank 0 reads and sends to the others.

        Raises what `read` and `prove` raise in rank 0, and PeerLostError in the others.
        """
        links, run = self.links, self._waits.run
        if links is None:
            return prove(run(read))
        if self.rank_group.rank != 0:
            received = links.receive_manifests(2 * self.rank_group.limits.silence_s)
            try:
                return prove(received)
            except TornCheckpointError:
                # They came through other ranks' memory: only its own reading proves what the store holds.
                return prove(run(read))
        try:
            found = run(read)
        except NoticeDeadlineError:
            # The closed connections notify the others.
            raise
        except Exception as error:
            links.announce_failure(error)
            raise
        run(partial(links.send_manifests, found))
        return prove(found)

    def agree_on_duties(
        self,
        name: str,
        needs: Collection[int],
        contents: Contents,
        filling: Filling,
        *,
        at_hand: Collection[int],
    ) -> Duties:
        """Agree with all ranks which blocks this rank reads, for which ranks, and which it receives.

        `name` is used once. This rank needs the blocks `needs`, and has copies of those `at_hand`. `filling` gets the
        blocks that other ranks send.
        """
        order = (number for number in contents.reading_order if number in needs)
        duties = Duties(reads=dict.fromkeys(order, ()), receives={})
        if self.links is None:
            return duties
        self.is_awaited = True
        own = {"runs": encode_runs(needs), "at_hand": encode_runs(at_hand)}
        silence_s = self.rank_group.limits.silence_s
        by_rank = self.rank_group.gather(f"{name}/needs", own, silence_s)
        message = None
        if by_rank:  # only in rank 0
            runs, copied = ([each[what] for each in by_rank] for what in ("runs", "at_hand"))
            message = Sharing.of(runs, contents.table, copied).encode()
        sharing = Sharing.decode(self.rank_group.broadcast(f"{name}/sharing", message, 2 * silence_s))
        if sharing.groups:
            shared = sharing.assign_duties(
                self.rank_group.rank, needs, contents.table, contents.reading_order
            )
            self.links.deliver_to(filling.put_bytes, filling.fail)
            where = f"{name}/partners"
            if _connect_all(self.rank_group, self.links, where, shared.partners, self._addresses):
                duties = shared
        self.is_awaited = False
        return duties


@contextmanager
def exchange_among(rank_group: RankGroup, name: str, waits: Waits) -> Iterator[Exchange]:
    """Connect all ranks while they restore. If one is lost meanwhile, all others notice."""
    if not isinstance(rank_group, StoreRankGroup):
        yield Exchange(rank_group, waits=waits)
        return
    links = Links(rank_group.rank, rank_group.announce_loss, waits)
    exchange: Exchange | None = None
    try:
        exchange = _open_links(rank_group, links, name, waits)
        yield exchange
    except BaseException as error:
        # Other errors were announced, and all ranks raise them. These end this rank alone: the others lose it.
        alone = isinstance(error, PeerLostError | NoticeDeadlineError) or not isinstance(error, Exception)
        links.close(announced=not (alone or exchange is None or exchange.is_awaited))
        raise
    links.close()


def _open_links(rank_group: StoreRankGroup, links: Links, name: str, waits: Waits) -> Exchange:
    own = {"hosts": addresses_of_host(rank_group.store_host), "port": links.port}
    silence_s = rank_group.limits.silence_s
    by_rank = rank_group.gather(f"{name}/addresses", own, silence_s)
    chosen = {"by_rank": by_rank, "secret": secrets.token_hex(32)} if by_rank else None
    shared = rank_group.broadcast(f"{name}/all-addresses", chosen, 2 * silence_s)
    above, below = neighbors(rank_group.rank, rank_group.world_size)
    links.start(bytes.fromhex(shared["secret"]), below)
    peers = below if above is None else (above, *below)
    if _connect_all(rank_group, links, f"{name}/linked", peers, shared["by_rank"]):
        return Exchange(rank_group, links, shared["by_rank"], waits=waits)
    return Exchange(rank_group, waits=waits)


def _connect_all(
    rank_group: RankGroup, links: Links, name: str, peers: Collection[int], addresses: Sequence[Any]
) -> bool:
    """Make this rank's connections, and return whether all ranks, which all call this, have theirs."""
    why_not: str | None = None
    """Why this rank has no connection to one of `peers`; None if it has all."""

    try:
        links.connect_to(peers, addresses)
    except (PeerLostError, NoticeDeadlineError):
        raise
    except OSError as error:
        why_not = str(error)
    silence_s = rank_group.limits.silence_s
    by_rank = rank_group.gather(name, {"why_not": why_not}, silence_s)
    worst = next((each for each in by_rank if each["why_not"] is not None), {"why_not": None})
    worst = rank_group.broadcast(f"{name}/all", worst if by_rank else None, 2 * silence_s)
    if worst["why_not"] is None:
        links.await_peers(peers)
        return True
    if rank_group.rank == 0:
        _log.warning(
            "ranks can't connect, so each reads all that it needs from the store: %s", worst["why_not"]
        )
    return False
