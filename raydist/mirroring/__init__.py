"""Mirrored objects: modules, optimizers, schedulers, metrics, generators, parameters and buffers of a step.

The driver's half is `driver.py` (`MirrorDriver`), the replica's half `replica.py` (`MirrorReplica`); `messages.py`
lists what they send. A strategy calls `MirrorDriver.prepare` for each step, sends the payload to all replicas and calls
`dispatched`; each replica calls `MirrorReplica.apply` and runs the function. Neither half uses Ray.

Words: a *handle* is the number of an object, the same in all processes. *Control state* is all that an object has in
attributes (a learning rate, a training flag, `requires_grad`), except tensors and the states of optimizers and metrics.
A *payload* is what the driver sends with one step: new objects, the driver's changes (`Writes`), the function and its
arguments.

Begin with `messages.py`, then `driver.py`. Modules of the driver: `attributes`, `variables`, `gradients`, `objects`,
`tensor`, `scope`, `step_pickler`. Modules of a replica: `apply_update`, `function_cache`, `replica_hooks`. Modules of
both: `aggregation`, `handles`, `lazy_states`, `object_kinds`. `checked_steps` is for strategies without replicas.
"""
