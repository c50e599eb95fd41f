"""Repair the log of a root: find what is damaged, rebuild what can be proven, and append what stands for it."""
