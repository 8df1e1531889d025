"""`Model`: compile, fit, evaluate and predict for any torch module, over any strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import final

import torch
from torch import nn

from raydist.training.fitting import FittedModel
from raydist.training.measuring import MeasuredModel
from raydist.training.model_state import make_module, pack, rebuild, restore_module, restore_optimizer
from raydist.training.saving import read_model_file, write_model_file

__all__ = ["Model"]


@final
class Model(FittedModel, MeasuredModel):
    """A module with `compile`, `fit`, `evaluate` and `predict`, on the strategy in whose scope it was created.

    Every number equals that of a single replica: the optimised loss is the loss of the *global* batch, and losses and
    metrics count every row once, independent of the division of rows among replicas. A module that computes its own
    loss, as Hugging Face models do, is compiled with `loss="model"`, takes dicts, and saves itself:
    `model.module.save_pretrained(directory)`.

    Elements of datasets are (x, y) or (x, y, sample_weight), batched by the global batch size; arrays and torch
    DataLoaders are accepted as well. The module is called with x; a plain tuple is unpacked into its arguments. With
    sample weights the loss is sum(w * loss) / sum(w) over the global batch. Metrics do not see the weights.

    Args:
        module: The module; its parameters are trained in place.
        config: JSON-able keyword arguments of the module's constructor, saved so that `Model.load(path, module=Net)`
            can build the module again.

    >>> import numpy as np, torch, raydist as rd
    >>> x = np.arange(8, dtype=np.float32)[:, None]
    >>> data = rd.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.02), torch.nn.MSELoss())
    >>> history = model.fit(data, epochs=3, verbose=False)  # or model.fit(x, 2 * x, batch_size=4, epochs=3)
    >>> len(history.history["loss"]), model.predict(data, verbose=False).shape
    (3, torch.Size([8, 1]))

    Source: keras.Model.

    Attributes:
        stop_training: Set to True in a callback to end `fit` after the current execution.

    Raises:
        InvalidArgumentError: `module` is not a torch.nn.Module instance.
    """

    def save(self, path: str | os.PathLike[str], optimizer: bool = True) -> None:
        """Save module and optimizer state as one safetensors file. Replaces `path` atomically.

        Pickles nothing. Blocks for dispatched steps.

        Args:
            path: The file, or a URI that fsspec supports; its folder is created if needed.
            optimizer: Also save the optimizer's state if the model is compiled.

        Raises:
            InvalidArgumentError: `config`, or a value in `module.state_dict()` that is not a tensor, is not JSON-able.
            FailedPreconditionError: The folder must not be written to.
            OSError: The file system failed, for example because it is full. The previous file stays.

        >>> import tempfile, torch
        >>> model = rd.Model(torch.nn.Linear(2, 1), config={"in_features": 2, "out_features": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model.safetensors")
        ...     again = rd.Model.load(f"{folder}/model.safetensors")
        >>> torch.equal(again.module.weight, model.module.weight)
        True

        Source: keras.Model.save.
        """
        held = None if self._compiled is None or not optimizer else self._compiled.update.optimizer
        write_model_file(path, *pack(self._module, held, self._config))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        module: nn.Module | Callable[..., nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Model:
        """Return a model with the state of a file, not compiled. Call it in the scope.

        Args:
            path: A file written by `save`, or a URI that fsspec supports.
            module: The module to load into, in place; or a class or function that creates the module from the saved
                `config`. None: build the module that the file describes, a module of `torch.nn`, or a container
                (`Sequential`, `ModuleList`, `ModuleDict`) of such modules; a file never causes code to be imported.
            optimizer: An optimizer over `module`'s parameters to load into, in place.

        Returns:
            The model; call :meth:`compile` to continue training.

        Raises:
            NotFoundError: The file does not exist.
            DataLossError: The file is damaged.
            InvalidArgumentError: State and module (or optimizer) do not fit, or the module cannot be built.

        >>> import tempfile, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rd.Model(module).save(f"{folder}/model.safetensors")
        ...     model = rd.Model.load(f"{folder}/model.safetensors")
        >>> model.module[0]
        Linear(in_features=2, out_features=1, bias=True)

        Source: keras.models.load_model.
        """
        tensors, manifest = read_model_file(path)
        target = rebuild(manifest, tensors) if module is None else make_module(module, manifest)
        restore_module(target, tensors, manifest)
        if optimizer is not None:
            restore_optimizer(optimizer, tensors, manifest)
        return cls(target, config=manifest.config)

    def _whole(self) -> Model:
        return self
