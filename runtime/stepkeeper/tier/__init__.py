"""Use a local disk between a trainer and a slow root: saves are staged there, and copies of commits are read back.

Only the root decides what is committed. Data on the disk may be missing, half written or wrong: it is verified, or read
from the root instead.
"""

from stepkeeper.tier.cached_store import CachedStore
from stepkeeper.tier.disk import LocalTier, TierPlace
from stepkeeper.tier.staging import LocalStaging

__all__ = ["CachedStore", "LocalStaging", "LocalTier", "TierPlace"]
