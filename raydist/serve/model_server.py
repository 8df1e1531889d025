"""The Serve deployment of an exported model: requests, batches, and the takeover by a newer version."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from raydist.core.errors import InvalidArgumentError, NotFoundError, SpecError
from raydist.serve.rest import ROUTE, metadata, read_inputs, version_status, write_outputs
from raydist.training.exported_model import ExportedModel, load_exported, versions_in

_POLL_S = 1.0
_LOG = logging.getLogger("ray.serve")


@final
@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version in memory."""

    number: int
    model: ExportedModel


_Call = tuple[ServedVersion, list[torch.Tensor]]


@final
class ModelServer:
    """One Serve replica of a model. The constructor loads the newest version; a thread looks for newer ones."""

    def __init__(self, directory: str, name: str, max_batch_size: int, batch_wait_timeout_s: float) -> None:
        self._directory = Path(directory)
        self._name = name
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._next: dict[str, Any] | None = None  # status of a version that is loaded, or that failed
        self._current = self._loaded(self._newest())
        batch = serve.batch(max_batch_size=max_batch_size, batch_wait_timeout_s=batch_wait_timeout_s)
        self._run_in_batch: Any = batch(self._run)
        threading.Thread(target=self._watch, name="raydist-versions", daemon=True).start()

    def _newest(self) -> int:
        if not (numbers := versions_in(self._directory)):
            raise NotFoundError(f"An export must be in {str(self._directory)!r} to be served. Call Model.export first.")
        return numbers[-1]

    def _loaded(self, number: int) -> ServedVersion:
        return ServedVersion(number, load_exported(self._directory / str(number), self._device))

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                self._take_over()
            except Exception as error:  # of any kind: the version before goes on
                if self._next is None or self._next["status"]["error_message"] != str(error):
                    _LOG.exception("A new version of %s cannot be served.", self._name)

    def _take_over(self) -> None:
        if (number := self._newest()) == self._current.number:
            self._next = None
            return
        try:
            if self._next is None or self._next["version"] != str(number):
                self._next = version_status(number, "LOADING")
            self._current = self._loaded(number)  # batches that have begun hold the version before
            self._next = None
        except Exception as error:
            self._next = version_status(number, "END", str(error))
            raise

    async def __call__(self, request: Request) -> Response:
        """Answer a request; see `rd.serve.app`."""
        try:
            content, status = await self._answer(request), 200
        except NotFoundError as error:
            content, status = _error(error), 404
        except (InvalidArgumentError, SpecError, IndexError) as error:
            content, status = _error(error), 400
        except Exception as error:  # of the program
            _LOG.exception("A prediction of %s failed.", self._name)
            content, status = _error(error), 500
        return Response(content, status, media_type="application/json")

    async def _answer(self, request: Request) -> bytes:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        found, version = ROUTE.fullmatch(path), self._current
        if found is None or request.method != ("POST" if found["what"] == ":predict" else "GET"):
            raise NotFoundError(
                f"Malformed request: {request.method} {path}. Use POST /v1/models/{self._name}:predict."
            )
        if found["name"] != self._name or found["version"] not in (None, str(version.number)):
            raise NotFoundError(f"Servable not found for request: {path}. Served is {self._name!r} {version.number}.")
        model = version.model
        if found["what"] == "/metadata":
            return json.dumps(metadata(self._name, version.number, model.inputs, model.outputs)).encode()
        if found["what"] == ":predict":
            inputs, by_rows = read_inputs(await request.body(), [*model.inputs])
            outputs = await self._run_in_batch((version, model.prepare(inputs)))
            if isinstance(outputs, Exception):
                raise outputs
            return write_outputs(dict(zip(model.outputs, outputs, strict=True)), by_rows=by_rows)
        statuses = [version_status(version.number, "AVAILABLE"), *filter(None, [self._next])]
        return json.dumps({"model_version_status": statuses}).encode()

    async def _run(self, calls: list[_Call]) -> list[Any]:
        """Run the program in this thread, so that requests which arrive meanwhile make one batch after it."""
        return run_all(calls)


def _error(error: Exception) -> bytes:
    return json.dumps({"error": str(error)}).encode()


def run_all(calls: Sequence[_Call]) -> list[Any]:
    """Return results, or the exception, of each call; calls of one version run as one."""
    results: dict[int, Any] = {}
    for version in {call[0] for call in calls}:
        places = [place for place, call in enumerate(calls) if call[0] is version]
        results |= zip(places, _run_together(version.model, [calls[place][1] for place in places]), strict=True)
    return [results[place] for place in range(len(calls))]


def _run_together(model: ExportedModel, parts: Sequence[list[torch.Tensor]]) -> list[Any]:
    try:
        outputs = model.run([_joined(tensors) for tensors in zip(*parts, strict=True)])
        sizes = [len(tensors[0]) for tensors in parts]
        return [list(rows) for rows in zip(*(output.cpu().split(sizes) for output in outputs), strict=True)]
    except Exception as error:
        if len(parts) == 1:
            return [error]
    return [_run_together(model, [part])[0] for part in parts]  # the others are not at fault


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows; ids and weights of rows with fewer values are padded as in `FeatureSpace.transform`."""
    if len(tensors) == 1 or tensors[0].ndim != 2:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    padding = 0 if tensors[0].is_floating_point() else -1
    pad = torch.nn.functional.pad
    return torch.cat([pad(tensor, (0, width - tensor.shape[1]), value=padding) for tensor in tensors])
