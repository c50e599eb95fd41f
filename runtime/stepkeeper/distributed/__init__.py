"""Form the process group of a training in one line, whoever started its processes."""

from stepkeeper.distributed.groups import init
from stepkeeper.distributed.membership import Membership

__all__ = ["Membership", "init"]
