"""Checkpoint saves inside a run whose function draws batches itself: each draw is a step boundary.

All replicas count draws and calls of `save` alike, and copy their shares at the same boundary. During the run, the
driver polls the replicas for wanted saves, writes its own states as of the beginning of the run, and commits.
"""
