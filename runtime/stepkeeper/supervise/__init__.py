"""Supervise a training on one machine by the operator's rules: `stepkeeper run` and `stepkeeper rehearse`."""
