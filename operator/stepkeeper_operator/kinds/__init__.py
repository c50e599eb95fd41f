"""Reconcile objects of any kind: the queue, one round for one object, what it writes, and when it may write again."""
