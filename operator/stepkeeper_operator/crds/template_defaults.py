"""Write down the defaults that the API server puts into a pod template, as a module that the operator can use."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["build_template_defaults", "find_defaults"]

_HEAD = '''"""List the defaults that the API server puts into spec.template, by path; "[]" is any item of a list.

Made by `make generate` from crds/pod_template.yaml.
"""

from collections.abc import Mapping
from typing import Final

__all__ = ["TEMPLATE_DEFAULTS"]

TEMPLATE_DEFAULTS: Final[Mapping[str, str | int | bool]] = {
'''


def build_template_defaults(schema: Mapping[str, Any]) -> str:
    """Build the text of the module for the schema of a pod template."""
    lines = (f"    {json.dumps(path)}: {_render(value)},\n" for path, value in sorted(find_defaults(schema)))
    return _HEAD + "".join(lines) + "}\n"


def find_defaults(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str | int | bool]]:
    """Yield the path of each field with a default, and the default."""
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        if "default" in field:
            yield below, field["default"]
        yield from find_defaults(field, below)
    if "items" in schema:
        yield from find_defaults(schema["items"], f"{path}[]")


def _render(value: str | int | bool) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
