"""Saves within a run whose function draws batches itself: each draw is a boundary between two steps.

Replicas count the draws and the calls of `save`, all alike; they copy their shares at the same one. The driver asks
beside the run what they want to save, writes its own part, which is that of the run's beginning, and commits.
"""
