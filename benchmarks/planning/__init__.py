"""Measure how long planning a save takes, by the number of chunks and ranks."""
