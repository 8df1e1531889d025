"""Which changes were applied, and who may still ask for some. Pure."""

from __future__ import annotations

from typing import Literal, final

from raydist.parameter_servers.requests import PushKey, Sender

__all__ = ["Ledger"]


@final
class Ledger:
    """What one server remembers so that every change happens there once.

    A closure that runs again pushes under the keys of its first run, and a message may come twice: both find their key
    here. Keys of closures that have ended are forgotten, and count as known.

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
        """Refuse this generation of a worker, and those before it, from now on."""
        self._fenced[sender.worker] = max(sender.generation, self._fenced.get(sender.worker, -1))

    def is_fenced(self, sender: Sender) -> bool:
        """Whether nothing that this sender asks may change anything."""
        return sender.generation <= self._fenced.get(sender.worker, -1)

    def check(self, sender: Sender, key: PushKey) -> Literal["applied", "known", "fenced"]:
        """What is to become of a change: "applied" where it is new."""
        if self.is_fenced(sender):
            return "fenced"
        if key.closure < self._finished_below or key.index in self._known.get(key.closure, ()):
            return "known"
        return "applied"

    def enter(self, sender: Sender, key: PushKey) -> Literal["applied", "known", "fenced"]:
        """The same, and the key is known from now on."""
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
        """How many keys are remembered."""
        return sum(map(len, self._known.values()))
