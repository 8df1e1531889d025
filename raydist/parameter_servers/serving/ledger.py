"""The record of applied changes and of dead workers."""

from __future__ import annotations

from typing import Literal, final

from raydist.parameter_servers.requests import PushKey, Sender

__all__ = ["Ledger"]


@final
class Ledger:
    """The memory of one server by which it applies every change once.

    A closure that runs again pushes under the keys of its first run, and a message may come twice: the record has their
    keys. Keys of ended closures are forgotten, and count as known.

    >>> ledger = Ledger()
    >>> ledger.enter(Sender(0, 0), PushKey(closure=3, index=0))
    'applied'
    >>> ledger.enter(Sender(1, 0), PushKey(closure=3, index=0))
    'known'
    """

    def __init__(self) -> None:
        self._known: dict[int, set[int]] = {}
        self._finished_below = 0
        self._fenced: dict[int, int] = {}

    def fence(self, sender: Sender) -> None:
        """Refuse this generation of a worker, and earlier ones, from now on."""
        self._fenced[sender.worker] = max(sender.generation, self._fenced.get(sender.worker, -1))

    def is_fenced(self, sender: Sender) -> bool:
        """Return True if the sender's generation is fenced, so its changes are refused."""
        return sender.generation <= self._fenced.get(sender.worker, -1)

    def check(self, sender: Sender, key: PushKey) -> Literal["applied", "known", "fenced"]:
        """Return the verdict on a change: "applied" if it is new."""
        if self.is_fenced(sender):
            return "fenced"
        if key.closure < self._finished_below or key.index in self._known.get(key.closure, ()):
            return "known"
        return "applied"

    def enter(self, sender: Sender, key: PushKey) -> Literal["applied", "known", "fenced"]:
        """Return the verdict on a change, and record its key."""
        verdict = self.check(sender, key)
        if verdict == "applied":
            self._known.setdefault(key.closure, set()).add(key.index)
        if verdict != "fenced" and key.finished_below > self._finished_below:
            self._finished_below = key.finished_below
            for closure in [closure for closure in self._known if closure < key.finished_below]:
                del self._known[closure]
        return verdict

    @property
    def num_known(self) -> int:
        """Number of recorded keys."""
        return sum(map(len, self._known.values()))
