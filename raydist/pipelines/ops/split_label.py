"""Split of dict elements into pairs of features and label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.map import MapOp

__all__ = ["split_label"]


def split_label(op: DatasetOp, label: str) -> MapOp:
    """Return pairs (all other entries, entry `label`) of the dict elements of `op`.

    Raises:
        InvalidArgumentError: There is no such entry, or no other entry.
    """
    spec = op.element_spec()
    if label not in spec or len(spec) < 2:
        raise InvalidArgumentError(
            f"label_name must be one of several columns, got {label!r} and the columns {', '.join(spec):.500}."
        )
    split = _SplitLabel(label)
    return MapOp(op, split, output=DeclaredOutput.parse(split(spec)))


@final
@dataclass(frozen=True)
class _SplitLabel:
    label: str

    def __call__(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        return {name: value for name, value in fields.items() if name != self.label}, fields[self.label]
