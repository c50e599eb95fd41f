"""Choose which commits to delete, hold pinned ones, and delete their data."""
