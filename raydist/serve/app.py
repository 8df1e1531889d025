"""`rd.serve.app`: the Ray Serve application of an exported model."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from raydist.core.optional_packages import optional_module
from raydist.options.requirement import require
from raydist.training.exported_model import local_directory

if TYPE_CHECKING:
    from ray.serve import Application


def app(
    directory: str | os.PathLike[str],
    name: str,
    max_batch_size: int = 32,
    batch_wait_timeout_s: float = 0.0,
    **deployment_options: Any,
) -> Application:
    """Return an application for `ray.serve.run` that serves the newest version of an exported model.

    It answers as TensorFlow Serving does: `POST /v1/models/<name>:predict`, `GET /v1/models/<name>` and
    `GET /v1/models/<name>/metadata`, also with `/versions/<number>` after the name. A newer version in the directory is
    loaded in the background and then takes over; requests that have begun end with the version before. On a GPU the
    program runs there. Needs `pip install 'raydist[serve]'`.

    Args:
        directory: Directory of the model's versions, as for `Model.export`, on every node that serves.
        name: Name of the model in paths.
        max_batch_size: Most requests in one call of the program, >= 1; each may have several rows.
        batch_wait_timeout_s: Seconds for which a request waits for others to join it. With 0, those that arrived during
            the call before are joined.
        **deployment_options: Options of `ray.serve.deployment`, as `num_replicas` or `ray_actor_options`.

    Raises:
        FailedPreconditionError: Ray Serve is not installed.
        InvalidArgumentError: A number is out of range, the name has other characters than letters, digits, `.`, `_` and
            `-`, or the directory is a URI.

    Source: tensorflow_model_server, ray.serve.batch.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> _ = rd.Model(torch.nn.Linear(3, 2)).export(folder, torch.zeros(1, 3))
    >>> application = rd.serve.app(folder, "linear", max_batch_size=8)  # then: ray.serve.run(application)
    """
    require(max_batch_size >= 1, "max_batch_size must be >= 1", max_batch_size)
    require(batch_wait_timeout_s >= 0, "batch_wait_timeout_s must be >= 0", batch_wait_timeout_s)
    require(bool(re.fullmatch(r"[\w.-]+", name, re.ASCII)), "name must be of letters, digits, '.', '_' and '-'", name)
    serve = optional_module("ray.serve", "Served models", "'raydist[serve]'")
    from raydist.serve.model_server import ModelServer  # which imports Ray Serve

    options: Any = {"name": name, "max_ongoing_requests": 4 * max_batch_size, **deployment_options}
    deployment: Any = serve.deployment(**options)(ModelServer)
    found: Application = deployment.bind(str(local_directory(directory)), name, max_batch_size, batch_wait_timeout_s)
    return found
