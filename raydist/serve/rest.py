"""Requests and answers of TensorFlow Serving's REST interface, as JSON.

Source: https://www.tensorflow.org/tfx/serving/api_rest.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import TensorSpec
from raydist.training.exported_model import dtype_name

ROUTE = re.compile(r"/v1/models/(?P<name>[^/:]+)(/versions/(?P<version>\d+))?(?P<what>:predict|/metadata|)")

_SIGNATURE_NAME = "serving_default"
_TF_TYPES = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bytes": "STRING", "str": "STRING"}


def read_inputs(body: bytes, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return the inputs of a request by name, and True if the request has them by rows.

    Raises:
        InvalidArgumentError: The request is none.

    >>> read_inputs(b'{"instances": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]}', ["x", "y"])
    ({'x': [1, 3], 'y': [2, 4]}, True)
    >>> read_inputs(b'{"inputs": [1, 3]}', ["x"])
    ({'x': [1, 3]}, False)
    """
    try:
        request = json.loads(body, object_hook=_decoded)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"The body must be JSON, got another text: {error!s:.200}.") from None
    if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
        raise InvalidArgumentError('The body must be an object with either "instances" or "inputs". Give one of them.')
    if (signature := request.get("signature_name") or _SIGNATURE_NAME) != _SIGNATURE_NAME:
        raise InvalidArgumentError(f'signature_name must be "{_SIGNATURE_NAME}", got {signature!r:.100}.')
    if "inputs" in request:
        return _by_name(request["inputs"], names), False
    rows = request["instances"]
    if not isinstance(rows, list) or not rows:
        raise InvalidArgumentError(f'"instances" must be a list of at least one row, got {rows!r:.100}.')
    if not isinstance(rows[0], dict):
        return _by_name(rows, names), True
    if any(not isinstance(row, dict) or row.keys() != rows[0].keys() for row in rows):
        raise InvalidArgumentError('All "instances" must have the same inputs. Give each row all of them.')
    return {key: [row[key] for row in rows] for key in rows[0]}, True


def _decoded(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["b64"], validate=True) if value.keys() == {"b64"} else value


def _by_name(value: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if len(names) != 1:
        raise InvalidArgumentError(f"Inputs must be given by name: {[*names]}, got a {type(value).__name__}.")
    return {names[0]: value}


def write_outputs(outputs: Mapping[str, torch.Tensor], *, by_rows: bool) -> bytes:
    """Return the answer to a prediction: with one output its values, with several a dict of each row or of columns.

    >>> write_outputs({"x": torch.tensor([1, 2]), "y": torch.tensor([3, 4])}, by_rows=True)
    b'{"predictions": [{"x": 1, "y": 3}, {"x": 2, "y": 4}]}'
    >>> write_outputs({"x": torch.tensor([1, 2])}, by_rows=False)
    b'{"outputs": [1, 2]}'
    """
    columns: Any = {name: tensor.tolist() for name, tensor in outputs.items()}
    if len(columns) == 1:
        (columns,) = columns.values()
    elif by_rows:
        columns = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps({"predictions" if by_rows else "outputs": columns}).encode()


def metadata(name: str, version: int, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> Any:
    """Return the answer about a model's signature."""
    signature = {"inputs": _tensor_infos(inputs), "outputs": _tensor_infos(outputs)}
    definition = {_SIGNATURE_NAME: {**signature, "method_name": "tensorflow/serving/predict"}}
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version)},
        "metadata": {"signature_def": {"signature_def": definition}},
    }


def _tensor_infos(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    return {
        name: {
            "dtype": f"DT_{_TF_TYPES.get(dtype_name(spec), dtype_name(spec).upper())}",
            "tensor_shape": {
                "dim": [{"size": str(-1 if size is None else size), "name": ""} for size in spec.shape or ()],
                "unknown_rank": False,
            },
            "name": name,
        }
        for name, spec in specs.items()
    }


def version_status(version: int, state: Literal["LOADING", "AVAILABLE", "END"], error: str = "") -> dict[str, Any]:
    """Return the answer about one version."""
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"version": str(version), "state": state, "status": status}
