"""Plan a load: compare one rank's state with a checkpoint, and find the places of its bytes. Nothing is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Self, final

import torch

from stepkeeper.checkpoint.blocks import Contents
from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.manifest import Manifest, Shardings
from stepkeeper.checkpoint.reading import BlockReader, read_manifests
from stepkeeper.coordination.waits import Waits
from stepkeeper.log import CommitRecord, Log
from stepkeeper.log.foreign_steps import Restorable
from stepkeeper.restore.filling import STREAMS
from stepkeeper.restore.foreign.content import ForeignContent
from stepkeeper.restore.placing import Places, stored_tensor
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience
from stepkeeper_planners.adapters.open_shardings import collect_shardings, count_devices, is_inferred
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.differences import Differences
from stepkeeper_planners.loading.fitted_target import FittedTarget
from stepkeeper_planners.loading.load_request import LoadRequest, LoadTarget, Path, build_load_request
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.saved_shardings import PresentSharding, SavedShardings, choose_shardings
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import StateReads
from stepkeeper_planners.loading.stored_state import StoredState, read_key_paths
from stepkeeper_planners.pickles.dcp_metadata import read_metadata
from stepkeeper_planners.state.values import decode_value

__all__ = ["CommitContent", "Content", "EarlyPlan", "LoadPlan", "read_head"]

_HELD: Final = 8
"""The most blocks that are held. Further ones that have both values and elements are read twice."""

_ONCE: Final = Patience(total_s=0)


@final
class CommitContent:
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
        self.read_block, self.stream_block = self._reader.read_block, self._reader.stream_block
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


Content = CommitContent | ForeignContent


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Hold what one rank reads of a checkpoint, and the places that it goes to, which are filled once."""

    content: Content
    fitted: FittedTarget
    request: LoadRequest
    reads: StateReads
    differences: Differences
    values: Places = field(default_factory=Places)
    """The places of the values; empty, as those of the tensors, if there are differences that stop this rank."""

    tensors: Places = field(default_factory=Places)

    @classmethod
    def of(cls, content: Content, target: LoadTarget, ranks: Ranks, rules: LoadRules) -> Self:
        """Compare the target's state with the checkpoint, and plan its load.

        Raises:
            UnsupportedShardingError: A tensor's placement doesn't determine which device holds what.
            RestoreError: Something that is to be loaded is of an unsupported kind.
        """
        fitted = FittedTarget(target, content.stored, rules)
        shardings = _choose_shardings(content.contents.shardings, fitted.flat.tensors)
        request = build_load_request(fitted, ranks, shardings)
        reads, differences = compare(request, content.stored, ranks, fitted.rules)
        plan = cls(content=content, fitted=fitted, request=request, reads=reads, differences=differences)
        return plan if differences.stops_rank else plan._with_places(ranks, shardings)

    def _with_places(self, ranks: Ranks, shardings: Mapping[str, str]) -> Self:
        contents, pieces, of_groups = self.content.contents, self.reads.pieces, self.fitted.of_groups
        # Tensors of optimizers' groups are read with the values, and like these compared before the state changes.
        with_values = tuple(piece for piece in pieces if piece.fqn in of_groups)
        later = tuple(piece for piece in pieces if piece.fqn not in of_groups)
        values, tensors = (
            Places.of(contents, reads, self.request, self.fitted.flat.tensors, ranks, shardings=shardings)
            for reads in (
                replace(self.reads, pieces=with_values),
                replace(self.reads, pieces=later, values=()),
            )
        )
        if isinstance(self.content, ForeignContent):
            self.content.check_kinds((*values.by_block, *tensors.by_block))
        # A block with bytes for both is read with the values, and held in memory until the tensors are filled.
        for number in sorted(values.by_block.keys() & tensors.by_block.keys())[:_HELD]:
            values.hold_block(contents.table.blocks[number])
        return replace(self, values=values, tensors=tensors)

    @property
    def names(self) -> frozenset[str]:
        """Names of the state that are filled."""
        tensors, values = self.reads.pieces, self.reads.values
        return self.fitted.list_filled([*(each.fqn for each in tensors), *(each.fqn for each in values)])


def _choose_shardings(saved: Shardings, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
    """Choose shardings for tensors that have none; see `choose_shardings`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyPlan:
    """The plan to load the commit that was HEAD before the root was claimed. HEAD rarely changes meanwhile."""

    record: CommitRecord
    plan: LoadPlan

    def is_of(self, record: Restorable) -> bool:
        """Return whether it is the plan for this checkpoint."""
        if not isinstance(record, CommitRecord):
            return False
        return (record.folder, record.manifest) == (self.record.folder, self.record.manifest)


def read_head(store: Store) -> tuple[CommitRecord, Sequence[Manifest]] | None:
    """Read HEAD's commit and its manifests; None if there is none. Nothing is retried."""
    record = Log(store, patience=_ONCE).open().latest
    return None if record is None else (record, read_manifests(store, record, patience=_ONCE))
