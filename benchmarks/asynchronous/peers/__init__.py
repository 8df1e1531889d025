"""One module for each contender: `make_runs(scene)` gives the runs of a workload by name. `rank_*` are their ranks."""
