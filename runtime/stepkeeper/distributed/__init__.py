"""Form the process group of a training in one line, under any launcher."""

from stepkeeper.distributed.groups import Membership, init

__all__ = ["Membership", "init"]
