"""Load one checkpoint into the state of one rank: compare first, then fill the tensors, then set the values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

from stepkeeper.checkpoint.blocks import BlockTable, Contents
from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, Shardings
from stepkeeper.checkpoint.reading import BlockReader, prove_manifests, read_manifest_bytes
from stepkeeper.coordination.waits import Waits
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import ForeignRecord, Restorable
from stepkeeper.restore.filling import STREAMS, Blocks, Filling
from stepkeeper.restore.fit import check_refilled, encode_findings
from stepkeeper.restore.foreign.content import ForeignContent, decode_content, read_metadata_bytes
from stepkeeper.restore.peers.duties import Duties
from stepkeeper.restore.peers.exchange import Exchange
from stepkeeper.restore.placing import Places, StoredBytes, stored_tensor
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.storage import Store
from stepkeeper.storage.base import Buffer, CopiedStore
from stepkeeper_planners.adapters.open_shardings import collect_shardings, count_devices, is_inferred
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.garbage import without_collections
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.fitted_target import FittedTarget
from stepkeeper_planners.loading.load_request import LoadRequest, LoadTarget, Path, build_load_request
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.saved_shardings import PresentSharding, SavedShardings, choose_shardings
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import StateReads
from stepkeeper_planners.loading.stored_state import StoredState, read_key_paths
from stepkeeper_planners.loading.tied_tensors import build_tied_copies, check_tied_copies
from stepkeeper_planners.pickles.dcp_metadata import read_metadata
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.values import decode_value

__all__ = ["Loading"]

_HELD: Final = 8
"""The most blocks that are held. Further ones that have both values and elements are read twice."""


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
        waits: Waits,
    ) -> None:
        """Prepare to load `record` into the target's state.

        `store` is the root, perhaps with copies on a local disk. `half_filled` has names of the state that may hold
        parts of another checkpoint: this one must fill them.
        """
        self._waits = waits
        self._progress = RestoreProgress(f"step {record.step}", step=record.step)
        self._half_filled = half_filled
        self._store, self._record, self._target, self._ranks = store, record, target, ranks
        self._exchange, self._rules = exchange, rules
        # These are empty until `compare_state`.
        self._fitted = FittedTarget(LoadTarget({}), StoredState(tensors={}), rules)
        self._request = LoadRequest(layouts=())
        self._shardings: Mapping[str, str] = {}
        self._reads = StateReads(pieces=(), values=(), skipped=(), unread=())
        self._content: _CommitContent | ForeignContent | None = None
        self._values: _Share | None = None
        self._tensors: _Share | None = None
        self._loaded: Mapping[str, object] = {}

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the tensors and values in the checkpoint; known after `compare_state`."""
        return () if self._content is None else self._content.contents.names

    @property
    def names(self) -> frozenset[str]:
        """Names of the state that are filled; known after `compare_state`."""
        tensors, values = self._reads.pieces, self._reads.values
        return self._fitted.list_filled([*(each.fqn for each in tensors), *(each.fqn for each in values)])

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
        self._content = content = self._open_content()
        self._fitted = FittedTarget(self._target, content.stored, self._rules)
        self._shardings = self._choose_shardings(content.contents.shardings)
        self._request = build_load_request(self._fitted, self._ranks, self._shardings)
        self._reads, differences = compare(self._request, content.stored, self._ranks, self._fitted.rules)
        # Differences that stop one rank stop all. Unexpected names don't: another rank may ask for them.
        if not differences.stops_rank:
            check_refilled(self._half_filled, self.names)
            self._plan_filling(content)
        return encode_findings(differences, self.stored_names, rank=self._ranks.rank)

    def _open_content(self) -> "_CommitContent | ForeignContent":
        """Read the checkpoint's description in rank 0, and decode it in all ranks."""
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
        return _CommitContent(store, record, manifests, self._waits)

    def _plan_filling(self, content: "_CommitContent | ForeignContent") -> None:
        """Plan where the bytes go. The state's names and shapes fit."""
        contents, pieces, of_groups = content.contents, self._reads.pieces, self._fitted.of_groups
        # Tensors of optimizers' groups are read with the values, and like these compared before the state changes.
        with_values = tuple(piece for piece in pieces if piece.fqn in of_groups)
        later = tuple(piece for piece in pieces if piece.fqn not in of_groups)
        values, tensors = (
            Places.of(
                contents,
                reads,
                self._request,
                self._fitted.flat.tensors,
                self._ranks,
                shardings=self._shardings,
            )
            for reads in (
                replace(self._reads, pieces=with_values),
                replace(self._reads, pieces=later, values=()),
            )
        )
        if isinstance(content, ForeignContent):
            content.check_kinds((*values.by_block, *tensors.by_block))
        # A block with bytes for both is read with the values, and held in memory until the tensors are filled.
        for number in sorted(values.by_block.keys() & tensors.by_block.keys())[:_HELD]:
            values.hold_block(contents.table.blocks[number])
        held = _HeldBlocks(content, values.held)
        self._values = self._plan_share(content, content, values)
        self._tensors = self._plan_share(content, held, tensors, frozenset(values.held))

    def _plan_share(
        self,
        content: "_CommitContent | ForeignContent",
        reader: Blocks,
        places: Places,
        held: Collection[int] = (),
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

    def _choose_shardings(self, saved: Shardings) -> Mapping[str, str]:
        """Choose shardings for tensors that have none; see `choose_shardings`."""
        tensors = self._fitted.flat.tensors
        if not saved.by_name:
            return {}
        present = {
            fqn: PresentSharding(
                text=text, ndim=tensors[fqn].dim(), inferred=bool(text) and is_inferred(tensors[fqn])
            )
            for fqn, text in collect_shardings(tensors).items()
        }
        return choose_shardings(
            SavedShardings(n_devices=saved.n_devices, by_name=saved.by_name), present, count_devices()
        )

    def share_reading(self, name: str, *, of_values: bool) -> None:
        """Agree with the other ranks who reads which of the values' or tensors' blocks for whom. Raises PeerLostError.

        Ranks: all ranks call this.
        """
        share = self._values if of_values else self._tensors
        assert share is not None
        assert self._content is not None
        contents, needs = self._content.contents, share.places.by_block.keys() - share.held
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
        assert self._content is not None
        self._values.fill(self._exchange)
        decode, blobs = self._content.decode_value, self._values.places.values
        read = {name: decode(name, blob.data.tobytes()) for name, blob in blobs.items()}
        # From now on only `_HeldBlocks` refers to the held blocks, and frees each once it is read.
        self._values = None
        # Values that a failed restore has half filled must not stay, even if the load isn't strict.
        self._loaded, differences = self._reads.build_values(
            read, self._fitted, self._ranks, strict=self._rules.strict or bool(self._half_filled)
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
        self._tensors.fill(self._exchange)
        if isinstance(self._content, ForeignContent) and self._reads.tied_copies:
            self._waits.run(partial(self._check_tied_copies, self._content))
        return {}

    def _check_tied_copies(self, content: ForeignContent) -> None:
        reads, tensors = self._reads, content.contents.tensors
        boxes = {layout.fqn: layout.local_boxes(self._ranks.rank) for layout in self._request.layouts}
        copies = build_tied_copies(
            reads.tied_copies, reads.pieces, boxes, lambda name: dtype_of(tensors[name].dtype)
        )
        for piece in reads.tied_copies:
            part = piece.wanted_box.relative_to(piece.stored_box.offsets)
            chunk = content.read_chunk(piece.stored_fqn, piece.stored_index)
            copies[piece.stored_fqn].resolve_memory(piece).copy_(chunk[part.slices])
        check_tied_copies(copies.values(), self._fitted.flat.tensors, strict=self._rules.strict)

    @without_collections()
    def scatter_values(self) -> dict[str, Any]:
        """Set the values in the state, and call load_state_dict() of every Stateful with its part."""
        finish_load(self._target.state, self._fitted.filled, self._loaded)
        return {}


@final
class _CommitContent:
    """The tensors, values and blocks of a commit, as `ForeignContent` has those of another writer's step."""

    n_streams = STREAMS

    def __init__(
        self, store: Store, record: CommitRecord, manifests: Sequence[Manifest], waits: Waits
    ) -> None:
        self._name, self._waits = f"{record.folder}/{METADATA_NAME}", waits
        self._metadata_bytes = {each.path: each.size_bytes for each in manifests[0].objects}.get(
            METADATA_NAME, 0
        )
        self._reader = BlockReader(store, manifests)
        self.read_block = self._reader.read_block
        self.contents = contents = Contents.from_manifests(manifests)
        self.stored = StoredState(
            tensors={fqn: stored_tensor(tensor) for fqn, tensor in contents.tensors.items()},
            values=tuple(contents.values),
            read_paths=self._read_key_paths,
        )

    def _read_key_paths(self) -> Mapping[str, Path]:
        """Read from `.metadata` which keys led to each name. Manifests lack them, and few restores need them."""
        read = partial(self._reader.read_verified, METADATA_NAME, 0, self._metadata_bytes)
        return read_key_paths(read_metadata(self._waits.run(read), name=self._name))

    def decode_value(self, name: str, data: bytes) -> object:
        """Decode a value that was read. Raises ValueDecodeError if its type isn't supported."""
        return decode_value(name, data)


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

    def read_block(self, path: str, block: int) -> Buffer:
        held = self._held.pop((path, block), None)
        return self._reader.read_block(path, block) if held is None else held.data.data
