"""A module's tree of submodules as a TensorBoard graph, for modules that cannot be traced."""

from __future__ import annotations

from typing import Any

__all__ = ["module_tree"]


def module_tree(module: Any) -> bytes:
    """Return a serialised GraphDef with a node for each submodule without children; TensorBoard folds it by names.

    Args:
        module: A `torch.nn.Module`.
    """
    from tensorboardX.proto.graph_pb2 import (
        GraphDef,
    )  # takes 0.1 s, which replicas need not spend

    root = type(module).__name__
    found = GraphDef()
    for name, part in module.named_modules():
        if not any(True for _ in part.children()):
            path = "/".join((root, *name.split("."))) if name else root
            node = found.node.add(name=path, op=type(part).__name__)
            node.attr["parameters"].s = _described(part).encode()
    return bytes(found.SerializeToString())


def _described(part: Any) -> str:
    shapes = [f"{name} {tuple(value.shape)}" for name, value in part.named_parameters(recurse=False)]
    return ", ".join([*filter(None, (part.extra_repr(),)), *shapes])
