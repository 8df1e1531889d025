"""Data sets by name: `rd.load`, `rd.builder`, and the base class of your own.

Begin at `builder.py` (what a data set is) and `loading.py` (how a name becomes one). `split_specs.py` parses split
specs, `rows.py` reads the rows that a spec names. The other modules are the data sets that come with raydist.
"""
