"""Keep what is known of a cluster's virtual machines: one file in each one's folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from stepcluster.errors import ClusterError
from stepcluster.layout import N_NODES, Layout, check_node_name
from stepcluster.machine import write_json
from stepcluster.nodes import Node, vm_folder

FILE = "node.json"
METADATA = "metadata.json"
STARTUP_SCRIPT = "startup-script"


def read(layout: Layout, name: str) -> Node | None:
    """Read a virtual machine, on or off; None if there is none of this name."""
    path = vm_folder(layout, name) / FILE
    return Node(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def read_all(layout: Layout) -> tuple[Node, ...]:
    found = sorted(path.name for path in (layout.folder / "nodes").glob("*") if path.is_dir())
    return tuple(node for name in found if (node := read(layout, name)) is not None)


def create(
    layout: Layout,
    name: str,
    *,
    n_fixed: int,
    tpu_chips: int,
    metadata: Mapping[str, str],
    startup_script: str,
) -> Node:
    """Write down a new virtual machine, with the first number that is free after those of the `n_fixed` first nodes."""
    check_node_name(layout, name)
    taken = {node.number for node in read_all(layout)}
    number = next((n for n in range(n_fixed, N_NODES) if n not in taken), None)
    if number is None:
        raise ClusterError(f"cluster {layout.name!r} has {N_NODES} nodes: delete virtual machines first")
    folder = vm_folder(layout, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METADATA).write_text(json.dumps(dict(metadata)), encoding="utf-8")
    script = folder / STARTUP_SCRIPT
    script.write_text(startup_script, encoding="utf-8")
    script.chmod(0o700)
    node = Node(name=name, number=number, tpu_chips=tpu_chips, is_vm=True)
    write_json(folder / FILE, asdict(node))
    return node
