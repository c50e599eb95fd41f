"""Keep a local disk between a trainer and a slow root: saves are staged there, and copies of commits are read back.

Only a root decides what is committed. Whatever is on the disk may be missing, half written or wrong: it is
verified, or read at the root.
"""

from stepkeeper.tier.cached_store import CachedStore
from stepkeeper.tier.disk import LocalTier, TierPlace
from stepkeeper.tier.staging import LocalStaging

__all__ = ["CachedStore", "LocalStaging", "LocalTier", "TierPlace"]
