"""Show an object as `kubectl describe` does, which sorts the keys and separates the items of a list by nothing."""

import re
from collections.abc import Iterator
from typing import Any


def describe(raw: dict[str, Any]) -> list[str]:
    """Return the lines of the object, without events."""
    meta = raw["metadata"]
    shown = {key: meta[key] for key in ("creationTimestamp", "generation", "resourceVersion", "uid")}
    head = [
        f"Name: {meta['name']}",
        f"Namespace: {meta['namespace']}",
        "Labels: <none>",
        "Annotations: <none>",
    ]
    rest = {"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": shown}
    return [*head, *_lines(rest | {key: raw[key] for key in ("spec", "status") if key in raw})]


def _lines(value: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, item in sorted(value.items()):
        words = re.sub("([a-z])([A-Z])", r"\1 \2", key[:1].upper() + key[1:])
        title = f"{indent}{words}:"
        if isinstance(item, dict):
            yield title
            yield from _lines(item, indent + "  ")
        elif isinstance(item, list):
            yield title
            for each in item:
                yield from _lines(each, indent + "  ") if isinstance(each, dict) else [f"{indent}  {each}"]
        else:
            yield f"{title} {item}"
