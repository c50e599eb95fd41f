"""Make the nodes of a cloud in memory, and show them as the API does."""

from dataclasses import replace

from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudNode, CloudQueuedResource

__all__ = ["make_node", "show_node"]


def make_node(resource: CloudQueuedResource, node_id: str, state: str, *, n_hosts: int) -> CloudNode:
    """Make a node of the resource, as its request describes it."""
    return CloudNode(
        place=resource.place,
        id=node_id,
        state=state,
        n_hosts=n_hosts,
        addresses=tuple(f"10.0.0.{index}" for index in range(n_hosts)),
        labels=dict(resource.node.get("labels", {})),
        queued_resource=resource.name,
        autocheckpoint_enabled=bool(resource.node.get("autocheckpoint_enabled")),
    )


def show_node(node: CloudNode, version: ApiVersion) -> CloudNode:
    """Show the node as this version of the API does."""
    if version is ApiVersion.V2ALPHA1:
        return node
    return replace(node, autocheckpoint_enabled=None, maintenance=None)
