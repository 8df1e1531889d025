"""Training steps of raydist beside those of other libraries, and what they rest on: `python -m benchmarks.steps`.

A *workload* is what is repeated (a step, an all-reduce, a start); a *line* of its table is one way to do it, by one
*contender*, which runs in a process of its own; a *pass* repeats it for some seconds. Passes of different lines take
turns.
"""
