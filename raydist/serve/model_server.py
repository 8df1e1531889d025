"""The Serve deployment of an exported model: requests, batches, and the takeover by a newer version."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from raydist.core.errors import NotFoundError
from raydist.serve.rest import ROUTE, metadata, read_inputs, version_status, write_outputs
from raydist.training.exported_model import ExportedModel, load_exported, versions_in

Call = tuple[ExportedModel, list[torch.Tensor]]
"""Model and arguments of a prediction: a call keeps the version that it began with."""

_POLL_S = 1.0
_CODES = {NotFoundError: 404, ValueError: 400, TypeError: 400, IndexError: 400}  # InvalidArgumentError is a ValueError
_LOG = logging.getLogger("ray.serve")


@final
class ModelServer:
    """One Serve replica of a model. The constructor loads the newest version; a thread looks for newer ones."""

    def __init__(self, directory: str, name: str, max_batch_size: int, batch_wait_timeout_s: float) -> None:
        self._directory = Path(directory)
        self._name = name
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._coming: dict[str, Any] | None = None  # status of a version that is loaded, or that failed
        self._current = self._load(self._newest())
        batch = serve.batch(max_batch_size=max_batch_size, batch_wait_timeout_s=batch_wait_timeout_s)
        self._run_in_batch: Any = batch(self._run)
        threading.Thread(target=self._watch, name="raydist-versions", daemon=True).start()

    def _newest(self) -> int:
        if not (numbers := versions_in(self._directory)):
            raise NotFoundError(f"An export must be in {str(self._directory)!r} to be served. Call Model.export first.")
        return numbers[-1]

    def _load(self, number: int) -> tuple[int, ExportedModel]:
        return number, load_exported(self._directory / str(number), self._device)

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                self._take_over(self._newest())
            except Exception as error:  # of any kind: the version before goes on
                _LOG.warning("A new version of %s cannot be served: %s", self._name, error)

    def _take_over(self, newest: int) -> None:
        if newest == self._current[0]:
            self._coming = None
            return
        if self._coming is None or self._coming["version"] != str(newest):
            self._coming = version_status(newest, "LOADING")
        try:
            self._current = self._load(newest)
            self._coming = None
        except Exception as error:
            self._coming = version_status(newest, "END", str(error))
            raise

    async def __call__(self, request: Request) -> Response:
        """Answer a request; see `rd.serve.app`."""
        try:
            return Response(await self._answer(request), media_type="application/json")
        except Exception as error:
            code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), 500)
            if code == 500:
                _LOG.exception("A prediction of %s failed.", self._name)
            return Response(json.dumps({"error": str(error)}), code, media_type="application/json")

    async def _answer(self, request: Request) -> bytes:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        found, (number, model) = ROUTE.fullmatch(path), self._current
        if found is None or request.method != ("POST" if found["what"] == ":predict" else "GET"):
            raise NotFoundError(
                f"Malformed request: {request.method} {path}. Use POST /v1/models/{self._name}:predict."
            )
        if found["name"] != self._name or found["version"] not in (None, str(number)):
            raise NotFoundError(f"Servable not found for request: {path}. Served is {self._name!r} {number}.")
        if found["what"] == "/metadata":
            return json.dumps(metadata(self._name, number, model.inputs, model.outputs)).encode()
        if not found["what"]:
            statuses = [version_status(number, "AVAILABLE"), *filter(None, [self._coming])]
            return json.dumps({"model_version_status": statuses}).encode()
        inputs, by_rows = read_inputs(await request.body(), [*model.inputs])
        outputs = await self._run_in_batch((model, model.prepare(inputs)))
        if isinstance(outputs, Exception):
            raise outputs
        return write_outputs(dict(zip(model.outputs, outputs, strict=True)), by_rows=by_rows)

    async def _run(self, calls: list[Call]) -> list[Any]:
        """Run the program in this thread, so that requests which arrive meanwhile make one batch after it."""
        return run_all(calls)


def run_all(calls: Sequence[Call]) -> list[Any]:
    """Return the results, or the exception, of each call; calls of one model run as one."""
    results: dict[int, Any] = {}
    for model in {call[0] for call in calls}:
        places = [place for place, call in enumerate(calls) if call[0] is model]
        results |= zip(places, _run_together(model, [calls[place][1] for place in places]), strict=True)
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
    widths = [tensor.shape[1] if tensor.ndim == 2 else 0 for tensor in tensors]
    filler, pad = 0 if tensors[0].is_floating_point() else -1, torch.nn.functional.pad
    return torch.cat(
        [
            tensor if width == max(widths) else pad(tensor, (0, max(widths) - width), value=filler)
            for tensor, width in zip(tensors, widths, strict=True)
        ]
    )
