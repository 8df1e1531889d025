"""Communication between the ranks of a group: communicators, their backends, and the exchange of gradients.

Begin with `base.py` (the interface) and `opening.py` (the choice of a backend). Then read the backends:
`shared_memory/`, `hierarchical.py`, `process_group.py` (gloo, NCCL) and `xla/`. `reducer/reducer.py` exchanges
gradients.

Each replica opens two groups (`replicas/runner.py`): "gradients" for the reducer alone (not where a strategy exchanges
no gradients), and "values" for all other collectives, since a collective of a step may run inside a backward pass. A
`WatchedCommunicator` wraps both for the deadlock detector.

Ranks check three things at three places: calls in steps in `differentiable.py` by `checked.exchange`, the layout of
buckets in `reducer/buckets.py`, and the order of passes in the trailer (`reducer/trailer.py`).
"""
