"""Form the process group of a training in one line, whoever started its processes."""

from stepkeeper.distributed.groups import Membership, init

__all__ = ["Membership", "init"]
