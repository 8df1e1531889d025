"""Backward passes of a single replica whose gradients are checked for NaN and infinities.

Hooks on parameters, and optimizers that step in hooks, must not use unchecked gradients. So hooks are deferred, as in a
`GradientReducer`, and a second, short pass of the autograd engine runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch

from raydist.collectives.reducer.interception import Interception
from raydist.collectives.reducer.known_gradients import accumulate
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, fault_of, is_finite
from raydist.collectives.reducer.parameter_hooks import HeldBack, ParameterHooks

__all__ = ["CheckedBackward", "parameters_under"]

# Position of the argument of `torch.autograd.backward`.
_CREATE_GRAPH = 3


def parameters_under(roots: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Return the parameters in the autograd graph of these tensors, each one once, in the order of traversal.

    >>> layer = torch.nn.Linear(2, 1)
    >>> sorted(len(parameter) for parameter in parameters_under([layer(torch.ones(1, 2)).square() * 2]))
    [1, 1]
    """
    found = [root for root in roots if isinstance(root, torch.nn.Parameter)]
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            found.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


@final
class CheckedBackward:
    """Check of gradients in a step of a single replica.

    Args:
        policy: Treatment of NaN and infinite gradients.
    """

    def __init__(self, policy: NonfinitePolicy) -> None:
        self._policy = policy
        self._open: _Pass | None = None
        self._local = False
        self._num_passes = 0
        self._unseen: dict[int, torch.nn.Parameter] = {}  # with unchecked gradients of no_sync()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Check the gradients of every `backward()` that this thread calls inside the block."""
        self._num_passes = 0
        with Interception(self._backward):
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer the check of gradients inside the block until the next `backward()` outside of the block."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def _backward(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("tensors", ())
        parameters = parameters_under([given] if isinstance(given, torch.Tensor) else given)
        if self._open is not None:
            # A segment of a reentrant checkpoint: its parameters are not in the graph of the outer pass.
            self._open.take(parameters)
            original(*args, **kwargs)
        elif self._local:
            self._unseen.update((id(parameter), parameter) for parameter in parameters)
            original(*args, **kwargs)
        else:
            create_graph = bool(args[_CREATE_GRAPH] if len(args) > _CREATE_GRAPH else kwargs.get("create_graph", False))
            self._checked(parameters, original, args, kwargs, create_graph=create_graph)

    def _checked(
        self,
        parameters: Iterable[torch.nn.Parameter],
        original: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        create_graph: bool,
    ) -> None:
        self._num_passes += 1
        self._open = present = _Pass()
        try:
            present.take(parameters)
            original(*args, **kwargs)
            self._judge(present)
        except BaseException:
            present.undo()
            raise
        finally:
            self._open = None
            hooked = present.give_back()
        present.show(hooked, original, create_graph=create_graph)

    def _judge(self, ended: _Pass) -> None:
        unseen, self._unseen = self._unseen, {}
        new = {parameter: [parameter.grad] for parameter in ended.parameters.values() if parameter.grad is not None}
        for parameter in unseen.values():
            earlier = ended.earlier_of(parameter)
            if earlier is not None:
                new.setdefault(parameter, []).append(earlier)
        finite = all(is_finite(gradient) for gradients in new.values() for gradient in gradients)
        if self._policy.refuses(new, new_are_finite=finite):
            faults = {parameter: _fault_of_all(gradients) for parameter, gradients in new.items()}
            numbers = dict(enumerate(faults))
            said = {number: faults[parameter] for number, parameter in numbers.items() if faults[parameter]}
            raise self._policy.error(f"backward pass {self._num_passes} of the step", [said], numbers)


def _fault_of_all(gradients: Iterable[torch.Tensor]) -> int:
    fault = 0
    for gradient in gradients:
        fault |= fault_of(gradient)
    return fault


@final
class _Pass:
    """One backward pass, during which `.grad` holds new gradients only."""

    def __init__(self) -> None:
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self._earlier: dict[int, torch.Tensor | None] = {}
        self._held: list[HeldBack] = []
        self._hooked: dict[int, torch.nn.Parameter] = {}

    def take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Set aside `.grad` and defer the hooks of these parameters, once for each parameter."""
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self.parameters}
        hooked = {key: parameter for key, parameter in new.items() if ParameterHooks.of(parameter)}
        self._held.append(HeldBack(hooked))
        self._hooked |= hooked
        self.parameters |= new
        for key, parameter in new.items():
            self._earlier[key], parameter.grad = parameter.grad, None

    def earlier_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return `.grad` as it was before the pass."""
        return self._earlier.get(id(parameter), parameter.grad)

    def undo(self) -> None:
        """Restore `.grad` as it was before the pass."""
        for key, parameter in self.parameters.items():
            parameter.grad = self._earlier[key]

    def give_back(self) -> dict[int, torch.nn.Parameter]:
        """Restore the hooks, and return the parameters that have hooks."""
        for held in self._held:
            held.give_back()
        return self._hooked

    def show(
        self, hooked: Mapping[int, torch.nn.Parameter], original: Callable[..., None], *, create_graph: bool
    ) -> None:
        """Add the new gradients to the earlier ones. For parameters with hooks, torch does so and calls the hooks."""
        for_hooks: dict[torch.nn.Parameter, torch.Tensor] = {}
        for key, parameter in self.parameters.items():
            earlier, new = self._earlier[key], parameter.grad
            if key in hooked and new is not None:
                for_hooks[parameter], parameter.grad = new, earlier
            elif new is None:
                parameter.grad = earlier
            elif earlier is not None:
                parameter.grad = accumulate(earlier, new)
        if for_hooks:
            original(tuple(for_hooks), tuple(for_hooks.values()), create_graph=create_graph)
