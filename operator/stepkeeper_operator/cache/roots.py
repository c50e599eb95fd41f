"""Find the jobs that share a checkpoint root, without a look at all jobs."""

from collections import defaultdict

from stepkeeper_operator.facts.checkpoint_root import CheckpointRoot, JobRoot

__all__ = ["Roots"]


class Roots:
    """Keep the roots of jobs by their places, and by the places around these."""

    def __init__(self) -> None:
        self._roots: dict[str, JobRoot] = {}
        """By the job's uid."""

        self._at: defaultdict[CheckpointRoot, set[str]] = defaultdict(set)
        self._within: defaultdict[CheckpointRoot, set[str]] = defaultdict(set)

    def set_root(self, uid: str, root: JobRoot | None) -> None:
        """Replace the root of the job. None: it has none, or is gone."""
        known = self._roots.pop(uid, None)
        if known is not None:
            self._forget(self._at, known.place, uid)
            for around in _list_around(known.place):
                self._forget(self._within, around, uid)
        if root is not None:
            self._roots[uid] = root
            self._at[root.place].add(uid)
            for around in _list_around(root.place):
                self._within[around].add(uid)

    def list_rivals(self, uid: str) -> tuple[JobRoot, ...]:
        """List the other jobs whose root is the same as this job's, inside it or around it."""
        own = self._roots.get(uid)
        if own is None:
            return ()
        places = [self._at.get(place, ()) for place in (own.place, *_list_around(own.place))]
        found = {*self._within.get(own.place, ())}.union(*places) - {uid}
        return tuple(
            sorted((self._roots[each] for each in found), key=lambda root: (root.namespace, root.name))
        )

    @staticmethod
    def _forget(index: defaultdict[CheckpointRoot, set[str]], place: CheckpointRoot, uid: str) -> None:
        index[place].discard(uid)
        if not index[place]:
            del index[place]


def _list_around(place: CheckpointRoot) -> list[CheckpointRoot]:
    """List the places that this one is in, from the widest."""
    return [place[:depth] for depth in range(len(place))]
