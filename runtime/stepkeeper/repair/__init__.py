"""Repair the log of a root: find the damage, rebuild what can be proven, and append an entry that replaces it."""
