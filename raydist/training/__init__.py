"""Training loops of `rd.Model`: compile, fit, evaluate, predict.

Begin with `model.py`; `fit.py` has the loop over epochs, `passes.py` the loop over batches, both on the driver.
`steps.py` has the step functions that replicas run, with the losses of `losses.py` and the changes of parameters of
`updates.py`. `trackers.py` counts loss, rows and metrics on the replicas; `callbacks/` sees them as logs.
"""
