"""Store a root's objects. `open_store` turns a URI into a store."""

from stepkeeper.storage.base import ObjectStat, Store
from stepkeeper.storage.open import check_slashes, expand_home, open_store, root_uri

__all__ = ["ObjectStat", "Store", "check_slashes", "expand_home", "open_store", "root_uri"]
