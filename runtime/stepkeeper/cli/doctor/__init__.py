"""Check whether a root can be trusted: its log, latest commit and bucket, and the store's guarantees."""
