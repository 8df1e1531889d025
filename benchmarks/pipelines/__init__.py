"""Input pipelines of raydist beside those of other libraries: `python -m benchmarks.pipelines`.

A *workload* is what has to be read; a *contender* is a library (in one setting) that does it; a *pass* reads all of it
once. Every contender runs in a process of its own, and passes of different contenders take turns.
"""
