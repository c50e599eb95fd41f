"""Keep the nodes. A deleted one is kept for a while, because the causes of its pods' ends are judged later."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from stepkeeper_operator.facts import Node, read_node
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["NodeCache", "NodeChange"]

_GONE_NODE_KEPT_S = 900


class NodeChange(NamedTuple):
    """A node before and after it was recorded."""

    before: Node | None
    after: Node

    @property
    def concerns_jobs(self) -> bool:
        """True if the node's loss, identity or kind has changed: by these, the ends of pods are judged."""
        if self.before is None:
            return self.after.lost
        return _judged(self.before) != _judged(self.after)

    @property
    def queued_resource_uids(self) -> frozenset[str]:
        """The uids of the QueuedResources that lose, gain or keep the node, if anything of it has changed."""
        if self.before == self.after:
            return frozenset()
        uids = {self.after.queued_resource_uid}
        if self.before is not None:
            uids.add(self.before.queued_resource_uid)
        return frozenset(uid for uid in uids if uid is not None)


class NodeCache:
    """Keep the last known state of each node, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nodes: dict[str, Node] = {}

    def record(self, raw: RawObject, *, deleted: bool = False) -> NodeChange:
        """Keep the node. Return how it differs from the last time."""
        node = read_node(raw)
        if deleted:
            node = replace(node, gone_since=self._clock())
        change = NodeChange(self._nodes.get(node.name), node)
        self._nodes[node.name] = node
        self._forget_old_nodes()
        return change

    def forget(self, gone: frozenset[str]) -> Iterator[NodeChange]:
        """Mark the nodes with these uids as gone, and yield the change of each."""
        for node in [node for node in self._nodes.values() if node.uid in gone]:
            self._nodes[node.name] = replace(node, gone_since=self._clock())
            yield NodeChange(node, self._nodes[node.name])

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def list_uids(self) -> frozenset[str]:
        """List the uids of the nodes that are not known to be gone."""
        return frozenset(node.uid for node in self._list_present())

    def list_nodes_of(self, queued_resource_uid: str) -> tuple[Node, ...]:
        """List the present nodes whose labels name the QueuedResource, by name."""
        return tuple(n for n in self.list_queued_nodes() if n.queued_resource_uid == queued_resource_uid)

    def list_queued_nodes(self) -> tuple[Node, ...]:
        """List the present nodes whose labels name any QueuedResource, by name."""
        nodes = [node for node in self._list_present() if node.queued_resource_uid is not None]
        return tuple(sorted(nodes, key=lambda node: node.name))

    def count(self) -> tuple[int, int]:
        """Return the number of present nodes, and the number of them whose kubelet has gone silent."""
        present = self._list_present()
        return len(present), sum(node.unknown_since is not None for node in present)

    def _list_present(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.gone_since is None]

    def _forget_old_nodes(self) -> None:
        limit = self._clock() - _GONE_NODE_KEPT_S
        for name in [n.name for n in self._nodes.values() if (n.gone_since or limit) < limit]:
            del self._nodes[name]


def _judged(node: Node) -> tuple[str, bool, float | None, float | None]:
    return (node.uid, node.spot, node.unknown_since, node.gone_since)
