"""Load one checkpoint into the state of one rank: compare first, then fill the tensors, then set the values."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.checkpoint.reading import prove_manifests, read_manifest_bytes
from stepkeeper.coordination.waits import Waits
from stepkeeper.log.foreign_steps import ForeignRecord, Restorable
from stepkeeper.restore.filling import Blocks, Filling, StreamedBlocks
from stepkeeper.restore.fit import check_refilled, encode_findings
from stepkeeper.restore.foreign.content import ForeignContent, decode_content, read_metadata_bytes
from stepkeeper.restore.peers.duties import Duties
from stepkeeper.restore.peers.exchange import Exchange
from stepkeeper.restore.placing import Places, StoredBytes
from stepkeeper.restore.planning import CommitContent, Content, EarlyPlan, LoadPlan
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.storage import Store
from stepkeeper.storage.base import Buffer, CopiedStore
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.garbage import without_collections
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.tied_tensors import build_tied_copies, check_tied_copies
from stepkeeper_planners.state.filling import finish_load

__all__ = ["Loading"]


class Loading:
    """Load one commit, or one step of another writer, into one rank's state.

    Call `compare_state` first; once all ranks have, `share_reading` and `read_values`; once all ranks have,
    `share_reading` and `fill_tensors`; once all ranks have, `scatter_values`.
    """

    def __init__(
        self,
        store: Store,
        record: Restorable,
        target: LoadTarget,
        ranks: Ranks,
        *,
        exchange: Exchange,
        rules: LoadRules,
        half_filled: Collection[str] = (),
        early_plan: EarlyPlan | None = None,
        waits: Waits,
    ) -> None:
        """Prepare to load `record` into the target's state.

        `store` is the root, perhaps with copies on a local disk. `half_filled` has names of the state that may hold
        parts of another checkpoint: this one must fill them. `early_plan` is used if it is of this record.
        """
        self._waits = waits
        self._progress = RestoreProgress(f"step {record.step}", step=record.step)
        self._half_filled = half_filled
        self._store, self._record, self._target, self._ranks = store, record, target, ranks
        self._exchange, self._rules = exchange, rules
        self._early_plan = early_plan
        # These are None or empty until `compare_state`.
        self._plan: LoadPlan | None = None
        self._values: _Share | None = None
        self._tensors: _Share | None = None
        self._loaded: Mapping[str, object] = {}

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the tensors and values in the checkpoint; known after `compare_state`."""
        return () if self._plan is None else self._plan.content.contents.names

    @property
    def names(self) -> frozenset[str]:
        """Names of the state that are filled; known after `compare_state`."""
        return frozenset() if self._plan is None else self._plan.names

    @without_collections()
    def compare_state(self) -> dict[str, Any]:
        """Compare the state with the checkpoint, and plan what to read. Nothing in the state is changed.

        Returns:
            This rank's report to the others, with the mismatches of its state.

        Raises:
            TornCheckpointError: Bytes of the manifests or of `.metadata` are bad.
            UnsupportedShardingError: A tensor's placement doesn't determine which device holds what.
            StorageError: The store gave no answer, or refused.
            PartlyRestoredError: Names that hold parts of another checkpoint would not be filled.
            RestoreError: Something that is to be loaded is of an unsupported kind.
        """
        self._plan = plan = self._make_plan()
        # Differences that stop one rank stop all. Unexpected names don't: another rank may ask for them.
        if not plan.differences.stops_rank:
            check_refilled(self._half_filled, self.names)
            held = plan.values.held
            self._values = self._plan_share(plan.content, plan.content, plan.values)
            self._tensors = self._plan_share(
                plan.content, _HeldBlocks(plan.content, held), plan.tensors, frozenset(held)
            )
        return encode_findings(plan.differences, self.stored_names, rank=self._ranks.rank)

    def _make_plan(self) -> LoadPlan:
        """Read the checkpoint's description in rank 0, decode it in all ranks, and plan the load by it."""
        if self._early_plan is not None and self._early_plan.is_of(self._record):
            return self._early_plan.plan
        return LoadPlan.of(self._open_content(), self._target, self._ranks, self._rules)

    def _open_content(self) -> Content:
        store, record = self._store, self._record
        if isinstance(record, ForeignRecord):
            folder = record.folder
            return self._exchange.share_manifests(
                lambda: (read_metadata_bytes(store, folder),),
                lambda stored: decode_content(store, folder, stored[0]),
            )
        manifests = self._exchange.share_manifests(
            lambda: read_manifest_bytes(store, record),
            lambda stored: prove_manifests(stored, record, store.uri),
        )
        return CommitContent(store, record, manifests, self._waits)

    def _plan_share(
        self, content: Content, reader: Blocks, places: Places, held: Collection[int] = ()
    ) -> "_Share":
        filling = Filling(
            reader,
            content.contents.table,
            places,
            progress=self._progress,
            waits=self._waits,
            rank_group=self._exchange.rank_group,
            n_streams=content.n_streams,
        )
        return _Share(places=places, filling=filling, held=held)

    def share_reading(self, name: str, *, of_values: bool) -> None:
        """Agree with the other ranks who reads which of the values' or tensors' blocks for whom. Raises PeerLostError.

        Ranks: all ranks call this.
        """
        share = self._values if of_values else self._tensors
        assert share is not None
        assert self._plan is not None
        contents, needs = self._plan.content.contents, share.places.by_block.keys() - share.held
        share.duties = self._exchange.agree_on_duties(
            name, needs, contents, share.filling, at_hand=self._at_hand(needs, contents.table)
        )

    def _at_hand(self, needs: Collection[int], table: BlockTable) -> Sequence[int]:
        """Find the blocks among `needs` that this rank has copies of."""
        if not isinstance(self._store, CopiedStore):
            return ()
        folder = f"{self._record.folder}/"
        copied = self._waits.run(partial(self._store.list_copied, folder))
        return [number for number in needs if folder + table.blocks[number].path in copied]

    def read_values(self) -> dict[str, Any]:
        """Read this rank's values. Nothing in the state is changed: mismatches that they show are refused in time.

        Returns:
            This rank's report to the others, with the mismatches of its state.

        Raises:
            TornCheckpointError: Bytes of the checkpoint are bad.
            ValueDecodeError: A value is of an unsupported type.
            PerRankError: The values of other ranks can't be converted.
            PeerStoppedError: Another rank can't continue; the error has its reason.
            PeerLostError: Another rank is lost.
            StorageError: The store gave no answer, or refused.
        """
        assert self._values is not None
        assert self._plan is not None
        plan = self._plan
        self._values.fill(self._exchange)
        decode = plan.content.decode_value
        read = {name: decode(name, blob.data.tobytes()) for name, blob in plan.values.values.items()}
        # From now on only `_HeldBlocks` refers to the held blocks, and frees each once it is read.
        self._values = None
        plan.values.clear()
        # Values that a failed restore has half filled must not stay, even if the load isn't strict.
        self._loaded, differences = plan.reads.build_values(
            read, plan.fitted, self._ranks, strict=self._rules.strict or bool(self._half_filled)
        )
        return encode_findings(differences, self.stored_names, rank=self._ranks.rank)

    def fill_tensors(self) -> dict[str, Any]:
        """Read this rank's blocks and fill its tensors in place.

        Raises:
            TornCheckpointError: Bytes of the checkpoint are bad. The tensors are part old, part new then.
            LoadMismatchError: Tied tensors of the state have different elements in another writer's step.
            CastError: Elements don't fit the state's dtype.
            RestoreError: A tensor of another writer's step is of an unsupported kind.
            PeerStoppedError: Another rank can't continue; the error has its reason.
            PeerLostError: Another rank is lost.
            StorageError: The store gave no answer, or refused.
        """
        assert self._tensors is not None
        assert self._plan is not None
        self._tensors.fill(self._exchange)
        content = self._plan.content
        if isinstance(content, ForeignContent) and self._plan.reads.tied_copies:
            self._waits.run(partial(self._check_tied_copies, content, self._plan))
        return {}

    def _check_tied_copies(self, content: ForeignContent, plan: LoadPlan) -> None:
        reads, tensors = plan.reads, content.contents.tensors
        boxes = {layout.fqn: layout.local_boxes(self._ranks.rank) for layout in plan.request.layouts}
        copies = build_tied_copies(
            reads.tied_copies, reads.pieces, boxes, lambda name: dtype_of(tensors[name].dtype)
        )
        for piece in reads.tied_copies:
            part = piece.wanted_box.relative_to(piece.stored_box.offsets)
            chunk = content.read_chunk(piece.stored_fqn, piece.stored_index)
            copies[piece.stored_fqn].resolve_memory(piece).copy_(chunk[part.slices])
        check_tied_copies(copies.values(), plan.fitted.flat.tensors, strict=self._rules.strict)

    @without_collections()
    def scatter_values(self) -> dict[str, Any]:
        """Set the values in the state, and call load_state_dict() of every Stateful with its part."""
        assert self._plan is not None
        finish_load(self._target.state, self._plan.fitted.filled, self._loaded)
        return {}


@dataclass(slots=True, kw_only=True)
class _Share:
    """The part of a checkpoint that is read at once: the values, or the tensors."""

    places: Places
    filling: Filling
    held: Collection[int]
    """The blocks that are in memory already."""

    duties: Duties = field(default_factory=lambda: Duties(reads={}, receives={}))

    def fill(self, exchange: Exchange) -> None:
        self.filling.run({**dict.fromkeys(self.held, ()), **self.duties.reads}, exchange.links)


class _HeldBlocks:
    """Give the blocks that were read with the values from memory, each once, and the others from the store."""

    def __init__(self, reader: Blocks, held: Mapping[int, StoredBytes]) -> None:
        self._reader = reader
        self._held = {(each.path, each.start // BLOCK_BYTES): each for each in held.values()}

    def stream_block(self, path: str, block: int, put: Callable[[int, bytes], None]) -> bool:
        if (path, block) in self._held or not isinstance(self._reader, StreamedBlocks):
            return False
        return self._reader.stream_block(path, block, put)

    def read_block(self, path: str, block: int) -> Buffer:
        held = self._held.pop((path, block), None)
        return self._reader.read_block(path, block) if held is None else held.data.data
