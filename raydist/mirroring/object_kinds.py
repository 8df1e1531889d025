"""The kinds of mirrored objects, their control state, their parts, and the names of their parameters.

Parts are read without attribute access: a mirrored object would wait for the dispatched steps.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from raydist.collectives.tensors import flat_bytes
from raydist.compat.torch_internals import module_table, num_writes, parameter_table, plain_tensors
from raydist.core.weak_class_cache import remembered_by_class
from raydist.pickling.attribute_table import (
    AttributePath,
    AttributeTable,
    Digest,
    Identity,
    IdentitySnapshot,
    attributes,
    capture,
    patch,
    snapshot_of,
)
from raydist.pickling.torch_objects import match_class
from raydist.utils.sharded_tensors import is_sharded, own_of_sharding


@final
@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A family of mirrored objects.

    Attributes:
        name: Name of the kind, for messages.
        type: The base class of the objects.
        skip: Attributes that are not control state: tensors that are sent separately, and state of one process.
    """

    name: str
    type: type
    skip: frozenset[str] = frozenset()


MODULES = ObjectKind("module", torch.nn.Module)
OPTIMIZERS = ObjectKind("optimizer", torch.optim.Optimizer, frozenset({"state", "step", "zero_grad"}))
SCHEDULERS = ObjectKind("scheduler", LRScheduler)
SCALERS = ObjectKind("gradient scaler", torch.amp.GradScaler)
GENERATORS = ObjectKind("generator", torch.Generator)
KINDS = (MODULES, OPTIMIZERS, SCHEDULERS, SCALERS, GENERATORS)

# Wrappers around the instance's own methods, and results that each side caches for itself.
_METRIC_SKIP = frozenset(
    {"update", "compute", "_update_signature", "_computed", "_cache", "_forward_cache", "_update_count"}
)


def kind_of(obj: Any) -> ObjectKind | None:
    """Return the kind of `obj`, None if it has none (as tensors, which need a look at the scope)."""
    cls: Any = type(obj)
    return kind_of_class(cls)


@remembered_by_class
def kind_of_class(cls: Any) -> ObjectKind | None:
    """Return the kind of the objects of a class, None if there is none."""
    return next((kind for kind in KINDS if issubclass(cls, kind.type)), None)


def is_metric(obj: Any) -> bool:
    """Return True if `obj` is a torchmetrics Metric; torchmetrics is not imported."""
    return any(base.__name__ == "Metric" and base.__module__.startswith("torchmetrics.") for base in type(obj).__mro__)


def _skip(obj: Any) -> frozenset[str]:
    kind = kind_of(obj)
    if kind is SCALERS:
        # A GradScaler's state per optimizer lasts one step; its key, id(optimizer), differs between processes.
        return frozenset(name for name, value in attributes(obj).items() if isinstance(value, defaultdict))
    if kind is not None and kind is not MODULES:
        return kind.skip
    if is_metric(obj):
        return _METRIC_SKIP | frozenset(attributes(obj).get("_defaults", ()))
    # A compiled module only wraps the original module; its own state belongs to this process.
    held = attributes(obj)
    return frozenset(held) if "dynamo_ctx" in held else own_of_sharding(held)


def capture_object(obj: Any, digest: Digest) -> AttributeTable:
    """Return the control state of a mirrored object."""
    if isinstance(obj, torch.Generator):
        return capture({"state": bytes(obj.get_state().numpy())})
    return capture(attributes(obj), skip=_skip(obj), digest=digest)


def snapshot_object(obj: Any, digest: Digest) -> IdentitySnapshot | None:
    """Return an identity snapshot of the control state for a fast comparison later; None if identity is not enough."""
    return None if isinstance(obj, torch.Generator) else snapshot_of(_control_state(obj), digest)


def is_unchanged(obj: Any, snapshot: IdentitySnapshot) -> bool:
    """Return True if the control state of a mirrored object is unchanged since the snapshot."""
    return snapshot(_control_state(obj))


def _control_state(obj: Any) -> dict[str, Any]:
    skip, held = _skip(obj), attributes(obj)
    return {name: value for name, value in held.items() if name not in skip} if skip else held


def patch_object(obj: Any, changes: Mapping[AttributePath, Any]) -> None:
    """Apply changes of the control state from the other side to a mirrored object, in place."""
    if isinstance(obj, torch.Generator):
        state = changes.get(("state",))
        if state is not None:
            obj.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    patch(attributes(obj), changes, skip=_skip(obj))
    if isinstance(obj, torch.nn.Module):
        match_class(obj)


def is_just_seeded(generator: torch.Generator) -> bool:
    """Return True if no number was drawn since the seed was set."""
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(fresh.get_state(), generator.get_state())


def _number_in(tensor: torch.Tensor) -> str | None:
    """Return the text of a CPU scalar: some kernels (GradScaler's growth tracker) write without counting the write."""
    if tensor.dim() or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    return repr(tensor.item())  # text, since NaN != NaN


def content_digest(handle_of: Callable[[Any], int | None]) -> Digest:
    """Return a function that gives comparable marks for the leaves of control states.

    The mark is the handle for mirrored objects, identity and version for tensors (with the value for CPU scalars),
    identity for functions and classes, and a digest of the pickle for other mutable objects (identity if unpicklable).
    """

    def digest(value: Any) -> Hashable:
        handle = handle_of(value)
        if handle is not None:
            return "handle", handle
        if isinstance(value, torch.Tensor):
            with plain_tensors():
                return Identity(value), num_writes(value), _number_in(value)
        if kind_of(value) is not None or isinstance(value, type) or callable(value):
            return Identity(value)
        if type(value) is set and all(isinstance(item, str | int) for item in value):
            return frozenset(value)
        try:
            return hashlib.blake2b(pickle.dumps(value), digest_size=16).digest()
        except Exception:  # a user's __reduce__ may raise anything: fall back to identity
            return Identity(value)

    return digest


_EXTRA = "get_extra_state"
_TORCHS = ("torch.nn.", "torch.optim.")


def modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and all modules in it."""
    yield module
    for part in module_table(module).values():
        if part is not None:
            yield from modules_of(part)


def held_parameters(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module or an optimizer."""
    if isinstance(obj, torch.nn.Module):
        for part in modules_of(obj):
            yield from (each for each in parameter_table(part).values() if each is not None)
    else:
        for group in attributes(obj)["param_groups"]:
            yield from group["params"]


def has_load_hooks(obj: Any) -> bool:
    """Return True if a module or an optimizer has hooks on `load_state_dict`."""
    parts = modules_of(obj) if isinstance(obj, torch.nn.Module) else [obj]
    return any(_has_hooks(part, "load_state_dict") for part in parts)


def has_plain_state(obj: Any) -> bool:
    """Return True if a module or optimizer uses torch's own `state_dict` and `load_state_dict`, without hooks."""
    if has_load_hooks(obj):
        return False
    parts = list(modules_of(obj)) if isinstance(obj, torch.nn.Module) else [obj]
    return all(map(_is_plain, parts))


def _is_plain(part: Any) -> bool:
    held = attributes(part)
    if _has_hooks(part, "state_dict") or _EXTRA in held:
        return False
    return not any("state_dict" in name and callable(each) for name, each in held.items()) and _has_torchs(type(part))


def _has_hooks(part: Any, kind: str) -> bool:
    """Return True if a module or an optimizer has hooks of a kind."""
    return any(value for name, value in attributes(part).items() if kind in name and name.endswith("hooks"))


@remembered_by_class
def _has_torchs(cls: Any) -> bool:
    """Return True if the `state_dict` methods of a class are torch's own."""
    methods = [getattr(cls, name) for name in dir(cls) if "state_dict" in name]
    own = [each for each in methods if callable(each) and not each.__module__.startswith(_TORCHS)]
    return not own and getattr(cls, _EXTRA, None) in (None, torch.nn.Module.get_extra_state)


def trained_state(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of all mirrored objects, except of sharded parameters, which replicas hold parts of.

    The order of `objects` is the same on every replica.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
    >>> [name for name, _ in trained_state([layer, layer.weight, sgd])][:3]
    ['Linear.weight', 'SGD.param_groups[0].dampening', 'SGD.param_groups[0].differentiable']
    """
    held = list(objects)
    names = _parameter_names(held)
    for obj in held:
        if is_sharded(obj):
            continue
        if isinstance(obj, torch.nn.Parameter):
            yield names.get(id(obj), "a parameter"), obj
        elif isinstance(obj, torch.optim.Optimizer):
            yield from _optimizer_state(obj, names)


def names_of(parameters: Iterable[torch.nn.Parameter], objects: Iterable[Any]) -> list[str]:
    """Return names for parameters, by the modules among `objects` that contain them.

    >>> layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> names_of([layer.bias, other.bias, torch.nn.Parameter(torch.ones(2, 3))], [layer, other])
    ['Linear.bias', 'Linear(2).bias', 'a parameter of shape (2, 3)']
    """
    names = _parameter_names(objects)
    return [names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}") for parameter in parameters]


def row_tables(objects: Iterable[Any]) -> frozenset[int]:
    """Return the ids of the parameters whose gradients are sparse: of embeddings with `sparse=True`."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return frozenset(id(obj.weight) for obj in objects if isinstance(obj, kinds) and obj.sparse)


def _parameter_names(objects: Iterable[Any]) -> dict[int, str]:
    """Return names by id of the parameter. The second module of a class is `Linear(2)`, so that names are unique."""
    modules = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    names: dict[int, str] = {}
    num_of_class: Counter[str] = Counter()
    for module in modules:
        if id(module) in inner:
            continue
        kind = type(module).__name__
        num_of_class[kind] += 1
        title = kind if num_of_class[kind] == 1 else f"{kind}({num_of_class[kind]})"
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{title}.{name}")
    return names


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() - {"params"}):
            yield f"{kind}.param_groups[{number}].{key}", group[key]
        for parameter in group["params"]:
            state = {} if is_sharded(parameter) else optimizer.state.get(parameter, {})
            for key in sorted(state):
                yield f"{kind}.state[{names.get(id(parameter), 'a parameter')}].{key}", state[key]


def digest_of(value: Any) -> int:
    """Return a 32-bit checksum of a value: equal for equal bits, unlikely equal otherwise. 6 GB/s on a CPU.

    A GPU tensor is summed on the GPU in 64-bit words, so that the checksum does not depend on the order of the words.

    >>> digest_of(torch.tensor([1.0, 2.0])) == digest_of(torch.tensor([2.0, 1.0]))
    False
    """
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    dense = value.detach()
    if dense.is_sparse:
        dense = dense.to_dense()
    flat = flat_bytes(dense)
    about = zlib.crc32(f"{dense.dtype} {tuple(dense.shape)}".encode())
    if dense.device.type == "cpu":
        return zlib.crc32(flat.numpy().data, about)
    words = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat.to(torch.int64)
    return zlib.crc32(str(words.sum().item()).encode(), about)
