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
    """Trains a module with the strategy in whose scope it was made (keras.Model).

    Every number is the one that a single replica would give: the loss that is optimised is that of the *global* batch,
    losses and metrics count every row once, however rows fall on replicas. A module that computes its own loss, as
    those of Hugging Face do, is compiled with `loss="model"`, takes dicts, and saves itself:
    `model.module.save_pretrained(directory)`.

    Elements of datasets are (x, y) or (x, y, sample_weight), batched by the global batch size; arrays and torch
    DataLoaders are taken as well. The module is called with x; a plain tuple is unpacked into its arguments. With
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
        stop_training: Set it in a callback to end `fit` after the current execution.

    Raises:
        InvalidArgumentError: `module` is no torch.nn.Module instance.
    """

    def save(self, path: str | os.PathLike[str], optimizer: bool = True) -> None:
        """Save module and optimizer state as one safetensors file, replacing `path` at once or not at all.

        Nothing is pickled. Waits for dispatched steps.

        Args:
            path: The file, or a URI that fsspec knows; its folder is made if there is none.
            optimizer: Whether the optimizer's state is saved as well, once the model is compiled.

        Raises:
            InvalidArgumentError: `config`, or a value in `module.state_dict()` that is no tensor, is not JSON-able.
            FailedPreconditionError: Nothing may be written there.
            OSError: What the file system says: it is full, say. The file that was there before is there yet.

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
        """A model with the state of a file, not compiled. Call it in the scope.

        Args:
            path: What `save` wrote: a file, or a URI that fsspec knows.
            module: The module to load into, in place; or a class or function that makes it, which is called with the
                saved `config`. None: what the file says, which may be a module of `torch.nn`, or its containers
                (`Sequential`, `ModuleList`, `ModuleDict`) of such; a file never makes it import code.
            optimizer: An optimizer over `module`'s parameters to load into, in place.

        Returns:
            The model; call :meth:`compile` to train it further.

        Raises:
            NotFoundError: There is no such file.
            DataLossError: The file is damaged.
            InvalidArgumentError: State and module (or optimizer) do not fit, or the module can not be built.

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
