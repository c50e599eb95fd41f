"""Judgements: why an attempt ended, what that costs, when the next one may start. Pure."""
