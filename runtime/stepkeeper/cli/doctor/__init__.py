"""Check whether a root can be trusted: its log, latest commit and bucket, and what the store promises."""
