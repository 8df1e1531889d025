"""States of random number generators as text, and copies of objects that contain generators.

The state of a torch generator (5 KB) takes about 4 KB of text, one of numpy or Python at most as much.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import cloudpickle
import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError

_MAX_BYTES = 1 << 16  # maximum size of a decompressed state
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

_GLOBAL: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "numpy": (lambda: np.random.get_state(legacy=False), np.random.set_state),
    "python": (random.getstate, random.setstate),
}


def state_text(generator: Any) -> str | None:
    """Return the state of a generator of torch (on the CPU), numpy or Python; None for any other object.

    >>> generator = random.Random(3)
    >>> copy = generator_at(state_text(generator))
    >>> copy.random() == generator.random()
    True
    """
    if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
        return _text("torch", generator.get_state())
    if type(generator) is np.random.Generator:
        state = generator.bit_generator.state
        return _text(state["bit_generator"], state) if state["bit_generator"] in _BIT_GENERATORS else None
    if type(generator) is np.random.RandomState:
        return _text("numpy", generator.get_state(legacy=False))
    return _text("python", generator.getstate()) if type(generator) is random.Random else None


def generator_at(text: str) -> Any:
    """Return a new generator with a state from `state_text`.

    Raises:
        ValueError: `text` is not such a state.
    """
    kind = text.partition(":")[0]
    try:
        return _with_state(kind, _parse(text, kind))
    except Exception as error:  # libraries raise various errors for a modified file
        raise ValueError(f"no state of a generator: {text:.20} ({error!s:.80})") from None


def _with_state(kind: str, state: Any) -> Any:
    if kind == "torch":
        generator = torch.Generator()
        generator.set_state(state)
        return generator
    if kind == "python":
        python = random.Random()  # noqa: S311 - the program's own generator, not a secret
        python.setstate(state)
        return python
    if kind == "numpy":
        legacy = np.random.RandomState()
        legacy.set_state(state)
        return legacy
    if kind not in _BIT_GENERATORS:
        raise ValueError("unknown kind")
    bits = getattr(np.random, kind)()
    bits.state = state
    return np.random.Generator(bits)


def _text(kind: str, state: Any) -> str:
    if isinstance(state, torch.Tensor):
        data = state.numpy().tobytes()
    else:
        data = json.dumps(state, default=lambda array: array.tolist()).encode()
    return f"{kind}:{base64.b64encode(zlib.compress(data)).decode()}"


def _parse(text: str, kind: str) -> Any:
    unfolder = zlib.decompressobj()
    data = unfolder.decompress(base64.b64decode(text.partition(":")[2]), _MAX_BYTES)
    if kind == "torch":
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    state = json.loads(data)
    return (state[0], tuple(state[1]), state[2]) if kind == "python" else state


@final
class GlobalStates:
    """States of the process's global generators (of torch, numpy, Python), which can be installed temporarily.

    Args:
        texts: States from :meth:`texts`; None for the current states of the process's generators.
    """

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        if texts is None:
            self._states = {name: get() for name, (get, _) in _GLOBAL.items()}
        else:
            for name, text in texts.items():
                if name not in _GLOBAL or text.partition(":")[0] != name:
                    raise ValueError(f"no state of the process's generators: {name!s:.20}, {text!s:.20}")
                generator_at(text)
            self._states = {name: _parse(text, name) for name, text in texts.items()}

    def texts(self) -> dict[str, str]:
        """Return the states as text, by name."""
        return {name: _text(name, state) for name, state in self._states.items()}

    def only_changed(self, now: GlobalStates) -> dict[str, str]:
        """Return the states, as text, of the generators whose state differs in `now`."""
        mine, others = self.texts(), now.texts()
        return {name: text for name, text in mine.items() if others[name] != text}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Install these states for the `with` block; then keep the advanced states and restore the process's own."""
        own = {name: _GLOBAL[name][0]() for name in self._states}
        _set(self._states)
        try:
            yield
        finally:
            self._states = {name: _GLOBAL[name][0]() for name in self._states}
            _set(own)


def _set(states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        _GLOBAL[name][1](state)


@final
class PickledCopy:
    """A copy of an object as a pickle, apart from the states of its generators, so that these can be exchanged.

    Args:
        data: Pickle of the object.
        generators: States of the object's generators.
    """

    def __init__(self, data: bytes, generators: tuple[str, ...]) -> None:
        self._data = data
        self.generators = generators

    def with_generators(self, states: Any) -> PickledCopy:
        """Return the object with other states of its generators, which may come from a file."""
        texts = tuple(map(str, states))
        for text in texts:
            generator_at(text)
        if [text.partition(":")[0] for text in texts] != [text.partition(":")[0] for text in self.generators]:
            raise InvalidArgumentError(
                f"A state must be of a DataLoader with the same generators, got one of {len(texts)} generators for a "
                f"loader with {len(self.generators)}. Build the DataLoader as it was when the state was saved."
            )
        return PickledCopy(self._data, texts)

    def make(self, shared: Any) -> Any:
        """Return a copy of the object that refers to `shared` itself."""
        return _Unpickler(io.BytesIO(self._data), [generator_at(text) for text in self.generators], shared).load()


def set_generators(value: Any, shared: Any, texts: Sequence[str]) -> None:
    """Give the generators in `value` the states of a similar `PickledCopy`. Do nothing if `texts` do not fit."""
    pickler = _Pickler(io.BytesIO(), shared)
    pickler.dump(value)
    if len(pickler.held) != len(texts):
        return
    for generator, text in zip(pickler.held, texts, strict=True):
        state = _parse(text, text.partition(":")[0])
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:  # same method in torch and numpy
            generator.set_state(state)


def pickled_copy(value: Any, shared: Any) -> PickledCopy:
    """Return a pickled copy of `value`; `shared`, an object that it may refer to, is not copied.

    Raises:
        InvalidArgumentError: `value` cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, shared)
    try:
        pickler.dump(value)
    except Exception as error:
        raise InvalidArgumentError(
            "A DataLoader's sampler must be picklable, as raydist copies it at the beginning of every epoch: "
            f"{type(error).__name__}: {error}. Give a sampler class that makes what cannot be pickled in __iter__."
        ) from error
    return PickledCopy(file.getvalue(), tuple(pickler.states))


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    def __init__(self, file: io.BytesIO, shared: Any) -> None:
        super().__init__(file)
        self._shared = shared
        self._places: dict[int, int] = {}
        self.held: list[Any] = []  # keeps the objects alive, so that their ids stay unique
        self.states: list[str] = []

    def persistent_id(self, value: Any) -> int | None:
        if value is self._shared:
            return -1
        if id(value) not in self._places:
            text = state_text(value)
            if text is None:
                return None
            self._places[id(value)] = len(self.states)
            self.held.append(value)
            self.states.append(text)
        return self._places[id(value)]


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, generators: list[Any], shared: Any) -> None:
        super().__init__(file)
        self._generators = generators
        self._shared = shared

    def persistent_load(self, place: Any) -> Any:
        return self._shared if place == -1 else self._generators[place]
