"""A local disk between a trainer and a slow root: a save's first hop, and copies of commits to read back.

Only a root decides what is committed. Whatever is here may be missing, half written or wrong: it is verified, or read
at the root.
"""

from stepkeeper.tier.folder import LocalTier, TierPlace
from stepkeeper.tier.hop import FirstHop
from stepkeeper.tier.near import NearStore

__all__ = ["FirstHop", "LocalTier", "NearStore", "TierPlace"]
