"""The module that calls a model_fn, and `rd.get_or_create`: objects that a model_fn makes by name.

The driver calls the model_fn once with two rows, in the scope of the strategy: then `get_or_create` makes objects,
which are mirrored. In steps, each replica calls the model_fn with its rows, and `get_or_create` returns the replica's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raydist.core.contextvar_scope import contextvar_scope
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.estimator.spec import EstimatorSpec, ModeKeys

_current: ContextVar[ModelFnModule | None] = ContextVar("raydist_model_fn", default=None)
_Made = TypeVar("_Made")


def get_or_create(name: str, factory: Callable[[], _Made]) -> _Made:
    """Return the object of a name in the model_fn of an estimator; create it at the first call.

    Objects are created once, on the driver, in the scope of the strategy, when the estimator calls its model_fn with
    two rows. On replicas the function returns the replica's mirrored object. Modules, parameters and tensors, which
    become buffers, are parts of the model in checkpoints; optimizers that the model_fn returns are saved, too.

    Args:
        name: The name, without ".". Names of variables in checkpoints begin with it: "net.weight".
        factory: Creates the object.

    Raises:
        FailedPreconditionError: Called outside of a model_fn, or for the first time on a replica.
        InvalidArgumentError: The name has a ".", or is that of an attribute of `torch.nn.Module`.

    Source: tf.compat.v1.get_variable, which creates variables inside of a model_fn.

    >>> def model_fn(features, labels, mode):
    ...     net = rd.get_or_create("net", lambda: torch.nn.Linear(1, 1))
    ...     return rd.EstimatorSpec(mode, predictions=net(features))
    """
    module = _current.get()
    if module is None:
        raise FailedPreconditionError(
            f"get_or_create({name!r}) must be called in the model_fn of an estimator. Elsewhere make objects under "
            "strategy.scope(), and use them in the step."
        )
    found: _Made = module.get_or_create(name, factory)
    return found


@final
class ModelFnModule(nn.Module):
    """A module whose forward pass is a model_fn. Its parts are the objects that the model_fn has made.

    Args:
        model_fn: The function.
        mode: The mode.
        given: Arguments of the function beside features and labels.
        takes_labels: True if the function has a parameter for labels.
    """

    def __init__(
        self, model_fn: Callable[..., EstimatorSpec], mode: ModeKeys, given: Mapping[str, Any], *, takes_labels: bool
    ) -> None:
        super().__init__()
        self._model_fn = model_fn
        self._mode = mode
        self._given = dict(given)
        self._takes_labels = takes_labels
        self._objects: dict[str, Any] = {}
        self._building: list[tuple[nn.Module, dict[str, torch.Tensor]]] | None = None

    def build(self, batch: Any) -> EstimatorSpec:
        """Call the model_fn on the driver with a batch, so that it makes its objects, and return its result.

        Modules are in evaluation mode meanwhile, and get back the first values of their buffers.
        """
        made: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
        self._building = made
        with torch.no_grad():
            spec = self._call(*self._parts_of(batch))
            for module, buffers in made:
                for name, value in buffers.items():
                    module.get_buffer(name).copy_(value)
        self._building = None
        self.train()
        return spec

    def get_or_create(self, name: str, factory: Callable[[], Any]) -> Any:
        """Return the object of a name; see the function of that name."""
        for known in (self._modules, self._parameters, self._buffers, self._objects):
            if name in known:
                return known[name]
        if self._building is None:
            raise FailedPreconditionError(
                "Objects must be made when the estimator calls its model_fn for the first time, on the driver, but "
                f"{name!r} was asked for in a step only. Call get_or_create for it whatever the batch holds."
            )
        made = factory()
        try:
            self._add(name, made, self._building)
        except KeyError as error:
            raise InvalidArgumentError(f"The name must be without '.' and no attribute's, got {name!r}.") from error
        return made

    def _add(self, name: str, made: Any, building: list[tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
        if isinstance(made, nn.Module):
            self.add_module(name, made.eval())
            buffers = {key: value.clone() for key, value in made.named_buffers() if not is_lazy(value)}
            building.append((made, buffers))
        elif isinstance(made, nn.Parameter):
            self.register_parameter(name, made)
        elif isinstance(made, torch.Tensor):
            self.register_buffer(name, made)
        else:
            self._objects[name] = made

    def forward(self, *batch: Any, **features: Any) -> Any:
        """Return the predictions, or a dict with the loss and the arguments of metrics."""
        spec = self._call(*self._parts_of(features or batch))
        if self._mode is ModeKeys.PREDICT:
            return spec.predictions
        arguments = {name: tuple(given) for name, (_, *given) in spec.eval_metric_ops.items()}
        return {"loss": spec.loss, "metric_arguments": arguments}

    def _parts_of(self, batch: Any) -> tuple[Any, Any]:
        """Return features and labels: a batch of two parts, or of features alone."""
        if self._mode is ModeKeys.PREDICT or not isinstance(batch, tuple):
            return (batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch), None
        if len(batch) in (1, 2):
            return batch[0], (batch[1] if len(batch) == 2 else None)
        raise SpecError(f"Elements of an input_fn must be features or (features, labels), got a tuple of {len(batch)}.")

    def _call(self, features: Any, labels: Any) -> EstimatorSpec:
        with contextvar_scope(_current, self):
            spec = self._model_fn(features, **({"labels": labels} if self._takes_labels else {}), **self._given)
        if not isinstance(spec, EstimatorSpec):
            raise SpecError(f"model_fn must return an rd.EstimatorSpec, got {type(spec).__name__}.")
        return spec
