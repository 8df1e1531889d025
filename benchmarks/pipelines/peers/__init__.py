"""One module for each library: `PASSES` gives, for the name of a workload, what makes a pass of it."""
