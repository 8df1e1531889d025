"""One replica's access to the shared copy of the variables: tensor placement, publishing and fetching of values."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.storage.marks import mark_of_bits
from raydist.storage.placed import PlacedTensor, TensorPlace, can_be_placed, distance_of, places_of, storage_bytes
from raydist.storage.shard import ShardAddress, VariableShard

__all__ = [
    "CentralCopy",
    "CopiedVariables",
    "CopyImage",
    "Farthest",
    "StateImage",
    "parameters_of",
    "remembered",
    "same_memories",
    "take_state",
    "tensors_of",
]

_PLAIN = (bool, int, float, str, bytes, type(None))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def remembered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Any, Any]]:
    """Yield (parameter number, key, value) for all per-parameter state, in an order that does not change between steps.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
    >>> layer(torch.ones(1)).backward(); sgd.step()
    >>> [(number, key) for number, key, _ in remembered(sgd)]
    [(0, 'momentum_buffer')]
    """
    for number, parameter in enumerate(parameters_of(optimizer)):
        if parameter in optimizer.state:
            yield from ((number, key, value) for key, value in optimizer.state[parameter].items())


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the optimizer state tensors that can be placed in a shard."""
    return [value for _, _, value in remembered(optimizer) if can_be_placed(value)]


def same_memories(before: Sequence[tuple[int, Any, Any]], after: Sequence[tuple[int, Any, Any]]) -> bool:
    """Return True for the same tensors and equal plain values; other types (lists, say) count as changed."""
    return len(before) == len(after) and all(
        one[:2] == other[:2] and _same(one[2], other[2]) for one, other in zip(before, after, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other and can_be_placed(one)
    return isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)


@final
@dataclass(frozen=True, slots=True)
class StateImage:
    """The state of an optimizer, for replicas that map its tensors.

    Attributes:
        entries: (parameter number, key, place of the tensor in the shard, or the value itself).
        others: State under keys that are not parameters.
    """

    entries: tuple[tuple[int, Any, Any], ...]
    others: dict[Any, Any]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, place_of: Callable[[torch.Tensor], TensorPlace]) -> StateImage:
        """Capture the present state; `place_of` returns the place of a tensor in the shard."""
        known = set(parameters_of(optimizer))
        entries = tuple(
            (number, key, place_of(value) if can_be_placed(value) else value)
            for number, key, value in remembered(optimizer)
        )
        return StateImage(entries, {key: value for key, value in optimizer.state.items() if key not in known})


def take_state(
    optimizer: torch.optim.Optimizer, image: StateImage, bind: Callable[[torch.Tensor, TensorPlace], None]
) -> None:
    """Replace the state of an optimizer by `image`; `bind` points a tensor at a place in the shard.

    A tensor that the optimizer has under the same key stays the same object.
    """
    parameters = parameters_of(optimizer)
    held = {(number, key): value for number, key, value in remembered(optimizer)}
    optimizer.state.clear()
    optimizer.state.update(image.others)
    for number, key, value in image.entries:
        if isinstance(value, TensorPlace):
            before = held.get((number, key))
            tensor = before if isinstance(before, torch.Tensor) else torch.empty(0, dtype=value.dtype)
            bind(tensor, value)
            value = tensor
        optimizer.state[parameters[number]][key] = value


# Distance of a replica's values from the shared values, and the tensor with that distance.
Farthest = tuple[float, torch.Tensor | None]


@final
@dataclass(frozen=True, slots=True)
class CopiedVariables:
    """The variables to place in the shared copy, in an order that is the same on all replicas.

    Attributes:
        parameters: All parameters.
        optimizers: All optimizers.
    """

    parameters: Sequence[torch.Tensor]
    optimizers: Sequence[torch.optim.Optimizer]

    def placeable(self) -> list[torch.Tensor]:
        """Return the parameters that can be placed in a shard."""
        return [parameter for parameter in self.parameters if can_be_placed(parameter)]

    def values(self) -> Iterator[Any]:
        """Yield the parameters and the values of the optimizers' state."""
        yield from self.parameters
        for optimizer in self.optimizers:
            yield from (value for _, _, value in remembered(optimizer))

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and state tensors that can be placed in a shard, each once."""
        return list({id(value): value for value in self.values() if can_be_placed(value)}.values())


@final
@dataclass(frozen=True, slots=True)
class CopyImage:
    """Data that other replicas need to map the shared copy.

    Attributes:
        address: Address of the shard; None if the replicas have mapped the shard already.
        parameters: Place of each parameter in the shard.
        states: State of each optimizer.
    """

    address: ShardAddress | None
    parameters: tuple[TensorPlace, ...]
    states: tuple[StateImage, ...]


@final
class CentralCopy:
    """The variables of one replica, and the shard that contains them.

    Args:
        map_parameters: Map CPU parameters from the shard; otherwise each replica has a private copy, as on a GPU.
    """

    def __init__(self, *, map_parameters: bool = True) -> None:
        self._map_parameters = map_parameters
        self._shard: VariableShard | None = None
        self._placed: dict[int, PlacedTensor] = {}
        self._copies: list[PlacedTensor] = []
        self._marks: torch.Tensor | None = None

    def forget(self) -> None:
        """Release the shard. Tensors keep their values, and the next placement starts anew."""
        self._placed = {}
        self._note_copies()
        self._use(None)

    def _use(self, shard: VariableShard | None) -> None:
        before, self._shard = self._shard, shard
        if before is not None and before is not shard:
            before.unlink()
            before.close()

    def covers(self, variables: CopiedVariables) -> bool:
        """Return True if all these tensors, and no others, are placed in the shard."""
        found = 0
        for value in variables.values():
            placed = self._placed.get(id(value))
            if placed is not None and placed.in_place:
                found += 1
            elif can_be_placed(value):
                return False
        return found == len(self._placed)

    def written(self) -> int:
        """Return a checksum of the places written outside an optimizer since the last update; 0 for none."""
        ranges = [] if self._shard is None else self._shard.own_ranges()
        copies = self._marks is not None and not torch.equal(self._mark(), self._marks)
        return (zlib.crc32(repr((ranges, copies)).encode()) | 1) if ranges or copies else 0

    def offer(self, variables: CopiedVariables) -> CopyImage:
        """Place all these tensors in a shard, with the values that they have on this replica."""
        tensors = variables.tensors()
        places, firsts = places_of(tensors)
        sizes = [first.untyped_storage().nbytes() for first in firsts]
        old = self._shard if self._keeps_places(sizes, tensors, places) else None
        shard = old or VariableShard.create(sizes)
        shard.publish_own()
        with shard.writing():
            for number, first in enumerate(firsts):
                placed = self._placed.get(id(first))
                if shard is not old or placed is None or not placed.mapped or not placed.in_place:
                    shard.shared(number).copy_(storage_bytes(first))
        self._use(shard)
        place_of = {id(tensor): place for tensor, place in zip(tensors, places, strict=True)}
        states = [StateImage.of(each, lambda tensor: place_of[id(tensor)]) for each in variables.optimizers]
        of_parameters = tuple(place_of[id(parameter)] for parameter in variables.placeable())
        return CopyImage(None if shard is old else shard.address, of_parameters, tuple(states))

    def _keeps_places(self, sizes: list[int], tensors: list[torch.Tensor], places: list[TensorPlace]) -> bool:
        """Return True if the present shard has the right sizes and every placed tensor would keep its place."""
        if self._shard is None or list(self._shard.layout.sizes) != sizes:
            return False
        known = ((self._placed.get(id(tensor)), place) for tensor, place in zip(tensors, places, strict=True))
        return all(placed is None or placed.place.number == place.number for placed, place in known)

    def take(self, image: CopyImage, variables: CopiedVariables) -> Farthest:
        """Point these tensors at the offered copy; return the largest distance and the parameter with that distance."""
        if image.address is not None and (self._shard is None or self._shard.address != image.address):
            self._use(VariableShard.open(image.address))
        shard = self._shard
        if shard is None:
            return 0.0, None
        distances: list[Farthest] = []
        bound = list(zip(variables.placeable(), image.parameters, strict=True))
        for parameter, place in bound:
            distances.append((distance_of(parameter, place.within(shard.shared(place.number))), parameter))
        shard.drop_own()
        self._placed = {}
        for parameter, place in bound:
            mapped = self._map_parameters and parameter.device.type == "cpu"
            self._placed[id(parameter)] = PlacedTensor.bind(parameter, place, shard, mapped=mapped)
        for optimizer, state in zip(variables.optimizers, image.states, strict=True):
            take_state(optimizer, state, functools.partial(self._bind_state, shard))
        self._note_copies()
        return _farthest(distances)

    def _bind_state(self, shard: VariableShard, tensor: torch.Tensor, place: TensorPlace) -> None:
        # Optimizer state is always mapped: the update runs on the CPU, whatever device the replica has.
        if id(tensor) not in self._placed:
            self._placed[id(tensor)] = PlacedTensor.bind(tensor, place, shard, mapped=True)

    def settled(self) -> None:
        """Unlink the shard once all replicas have mapped it, so that no other process can open it."""
        if self._shard is not None:
            self._shard.unlink()

    def publish(self) -> None:
        """Copy this replica's writes outside an optimizer to the shared values. Private pages stay until `fetch`."""
        if self._shard is None:
            return
        with self._shard.writing():
            for placed in self._copies:
                placed.shared.copy_(placed.own)
        self._shard.publish_own()

    def farthest(self) -> Farthest:
        """Return the largest distance between this replica's writes and the shared values, and the tensor with it."""
        ranges = [] if self._shard is None else self._shard.own_ranges()
        touched = [placed for placed in self._placed.values() if not placed.mapped or self._overlaps(placed, ranges)]
        return _farthest([(distance_of(placed.own, placed.shared), placed.tensor) for placed in touched])

    def _overlaps(self, placed: PlacedTensor, ranges: Sequence[tuple[int, int]]) -> bool:
        if self._shard is None:
            return False
        begin = self._shard.layout.offsets[placed.place.number]
        end = begin + self._shard.layout.sizes[placed.place.number]
        return any(first < end and begin < last for first, last in ranges)

    def fetch(self) -> None:
        """Discard what this replica wrote outside an optimizer, and read the shared values."""
        if self._shard is not None:
            self._shard.drop_own()
        self.fetch_copies()

    def fetch_copies(self) -> None:
        """Update the copies on other devices."""
        for placed in self._copies:
            placed.fetch()
        self._marks = self._mark() if self._copies else None

    def _mark(self) -> torch.Tensor:
        """Return a checksum of each copy's bits; `_version` does not count writes through `.data`."""
        return torch.stack([mark_of_bits(placed.own) for placed in self._copies])

    def _note_copies(self) -> None:
        self._copies = [placed for placed in self._placed.values() if not placed.mapped]
        if self._shard is not None and any(placed.own.is_cuda for placed in self._copies):
            self._shard.pin()
        self._marks = self._mark() if self._copies else None

    @contextlib.contextmanager
    def updating(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Return a context in which an optimizer reads and updates the shared parameters and state."""
        tensors = [*parameters_of(optimizer), *tensors_of(optimizer)]
        held = [self._placed[id(tensor)] for tensor in tensors if id(tensor) in self._placed]
        away = [(placed.tensor, placed.tensor.grad) for placed in held if not placed.mapped]
        with contextlib.ExitStack() as stack:
            if self._shard is not None:
                stack.enter_context(self._shard.writing())
            stack.callback(_set_gradients, away)  # runs last: a gradient must be on the device of its parameter
            for placed in held:
                stack.callback(placed.show_own)
                placed.show_shared()
            _set_gradients([(tensor, None if grad is None else grad.to("cpu")) for tensor, grad in away])
            yield


def _farthest(distances: Sequence[Farthest]) -> Farthest:
    return max(distances, key=lambda found: found[0], default=(0.0, None))


def _set_gradients(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for tensor, gradient in gradients:
        tensor.grad = gradient
