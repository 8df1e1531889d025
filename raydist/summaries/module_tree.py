"""A module's submodules as a graph for TensorBoard: what stands for its operations where nobody can trace them."""

from __future__ import annotations

from typing import Any

__all__ = ["module_tree"]


def module_tree(module: Any) -> bytes:
    """A GraphDef with a node for each submodule that has none itself, in bytes; TensorBoard folds it at the names.

    Args:
        module: A `torch.nn.Module`.
    """
    from tensorboardX.proto.graph_pb2 import GraphDef  # not where replicas load it: it takes a tenth of a second

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
