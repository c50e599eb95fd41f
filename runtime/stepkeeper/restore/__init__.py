"""Restoring: the ranks agree on a commit, each reads what it needs of it, every block verified as it is read."""

from stepkeeper.restore.loading import Loading
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.verifying import Verification

__all__ = ["Loading", "Restorer", "Verification"]
