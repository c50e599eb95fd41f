"""Suggest the name on the other side for a missing name: the same name under a prefix, or a misspelt one."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

_WRAPPERS: Final[Mapping[str, str]] = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""The names that wrappers insert into a model's names, with the wrapper."""

_COMPARED: Final = 2000
"""The largest number of unexpected names that one missing name is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameSuggestion:
    """One change that turns names of the state into names of the checkpoint."""

    rule: str
    fixes: int
    """The number of missing names that it fixes."""
    example: tuple[str, str]
    """A name in the state, and the same one in the checkpoint."""


def find_rename(missing: Sequence[str], unexpected: Sequence[str]) -> RenameSuggestion | None:
    """Return the change that turns the most missing names into unexpected ones: at least two, or the only one."""
    renames = [*_prefix_renames(missing, unexpected), *_segment_renames(missing, unexpected)]
    best = max(renames, key=lambda rename: rename.fixes, default=None)
    return best if best is not None and best.fixes >= min(2, len(missing)) else None


def suggest_names(missing: Sequence[str], unexpected: Sequence[str], limit: int) -> dict[str, str]:
    """Return the most similar unexpected name for each of the first `limit` missing names, if there is one."""
    by_last: defaultdict[str, list[str]] = defaultdict(list)
    for name in unexpected:
        by_last[name.rpartition(".")[2]].append(name)
    near: dict[str, str] = {}
    for name in missing[:limit]:
        candidates = by_last.get(name.rpartition(".")[2]) or unexpected
        found = get_close_matches(name, candidates[:_COMPARED], n=1, cutoff=0.75)
        if found:
            near[name] = found[0]
    return near


def _prefix_renames(missing: Sequence[str], unexpected: Sequence[str]) -> Iterator[RenameSuggestion]:
    """Yield the three most frequent changes of prefix: the beginnings in which a missing and an unexpected name differ.

    Each missing name is paired with an unexpected one that has the longest end in common with it.
    """
    by_end: dict[str, str] = {}
    for name in unexpected:
        for end in _suffixes(name):
            by_end.setdefault(end, name)
    changes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        common = next((end for end in _suffixes(name) if end in by_end), None)
        if common is not None:
            changes[name.removesuffix(common), by_end[common].removesuffix(common)] += 1
    known = set(unexpected)
    for (before, after), _ in changes.most_common(3):
        fixed = [
            (name, after + name.removeprefix(before))
            for name in missing
            if name.startswith(before) and after + name.removeprefix(before) in known
        ]
        if fixed and (before or after):
            yield RenameSuggestion(rule=_prefix_rule(before, after), fixes=len(fixed), example=fixed[0])


def _suffixes(name: str) -> Iterator[str]:
    """Yield the name, then the name without its first part, without its first two, and so on."""
    end = name
    while end:
        yield end
        end = end.partition(".")[2]


def _prefix_rule(before: str, after: str) -> str:
    mine = f"the state's names begin with {before!r}{_wrapper_hint(before)}"
    theirs = f"the checkpoint's names begin with {after!r}{_wrapper_hint(after)}"
    if not before:
        return f"{theirs}, the state's don't"
    return f"{mine}, {theirs}" if after else f"{mine}, the checkpoint's don't"


def _segment_renames(missing: Sequence[str], unexpected: Sequence[str]) -> Iterator[RenameSuggestion]:
    """Yield the renames that remove a wrapper's segment, anywhere in the names, on the side that has the wrapper."""
    for segment in _WRAPPERS:
        for wrapped, bare, holder, other in (
            (unexpected, missing, "checkpoint", "state"),
            (missing, unexpected, "state", "checkpoint"),
        ):
            known = set(bare)
            fixed = [(name, short) for name, short in _without(segment, wrapped) if short in known]
            if fixed:
                part = f"{segment!r}{_wrapper_hint(segment)}"
                # The name in the state comes first.
                example = fixed[0] if holder == "state" else fixed[0][::-1]
                rule = f"the {holder}'s names have a part {part}, the {other}'s don't"
                yield RenameSuggestion(rule=rule, fixes=len(fixed), example=example)


def _without(segment: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        parts = name.split(".")
        if segment in parts:
            yield name, ".".join(part for part in parts if part != segment)


def _wrapper_hint(prefix: str) -> str:
    by = next((_WRAPPERS[part] for part in prefix.split(".") if part in _WRAPPERS), None)
    return "" if by is None else f" (of {by}: get_model_state_dict() gives names without it)"
