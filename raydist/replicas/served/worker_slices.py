"""What a worker holds of variables on servers: which slices they are, which versions it has read, what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.parameter_servers.requests import Assign, CreateSlices, PushKey, ServerAnswer
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.client import Ask, ServerClient
from raydist.parameter_servers.worker.slice_table import ReadVersions, SliceTable
from raydist.parameter_servers.worker.worker_copies import WorkerCopies
from raydist.replicas.served.push import Pushed, ReadyPush, note_answer

__all__ = ["WorkerSlices"]


@final
class WorkerSlices:
    """All of one worker's.

    Args:
        client: Its way to the servers.

    Attributes:
        table: The slices of each variable.
        targets: By server and number of a slice, where its values are read to.
    """

    def __init__(self, client: ServerClient) -> None:
        self.table = SliceTable()
        self.targets: list[dict[int, torch.Tensor]] = [{} for _ in range(client.num_servers)]
        self._client = client
        self._copies = WorkerCopies()
        self._read = [ReadVersions() for _ in range(client.num_servers)]
        self._handle_of_slice: dict[int, int] = {}

    # --- variables that come and go -----------------------------------------------------------------------------------

    def adopt(self, slices: Sequence[ServedSlice], variables: Mapping[int, torch.Tensor]) -> list[int]:
        """Take over those of the variables, by handle, that have slices now; their handles."""
        new = [handle for handle in self.table.add(slices) if handle in variables]
        self._copies.add([(handle, variables[handle]) for handle in new])
        for handle in new:
            target = self._copies.target(handle)
            for part in self.table.of(handle):
                self.targets[part.server][part.number] = part.within(target)
                self._read[part.server].add([part.number])
                self._handle_of_slice[part.number] = handle
        return new

    def create(self, handles: Sequence[int]) -> None:
        """Give the servers these variables, with this worker's values."""
        asks: dict[int, Ask] = {}
        for server, parts in self._by_server(handles).items():
            values = [part.within(self._copies.own(part.handle)) for part in parts]
            asks[server] = Ask(CreateSlices(tuple(parts)), values)
        for server, (answer, _) in self._client.exchange(asks).items():
            created: Any = asks[server].request
            self._read[server].note_change([part.number for part in created.slices], answer.version)

    def forget(self, handle: int) -> None:
        """A variable is gone."""
        for part in self.table.forget(handle):
            self.targets[part.server].pop(part.number, None)
            self._read[part.server].drop([part.number])
            self._handle_of_slice.pop(part.number, None)
        self._copies.forget(handle)

    def numbers(self, handles: Iterable[int], server: int) -> tuple[int, ...]:
        """Of the slices of some variables, those that a server has."""
        known = [part for handle in handles if handle in self.table for part in self.table.of(handle)]
        return tuple(part.number for part in known if part.server == server)

    def _by_server(self, handles: Sequence[int]) -> dict[int, list[ServedSlice]]:
        found: dict[int, list[ServedSlice]] = {}
        for server in range(self._client.num_servers):
            parts = [part for handle in handles for part in self.table.of(handle) if part.server == server]
            if parts:
                found[server] = parts
        return found

    # --- reading ------------------------------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """By server, the newest version that is known of."""
        return tuple(each.newest for each in self._read)

    def read_older(self, seen: Sequence[int] | None) -> None:
        """Read what is held in an older version than `seen`, by server; None: than there is."""
        wanted: dict[int, dict[int, torch.Tensor]] = {}
        unless: dict[int, int] = {}
        for server, read in enumerate(self._read):
            if seen is None:
                wanted[server], unless[server] = self.targets[server], read.oldest(self.targets[server])
            else:
                targets = self.targets[server]
                older = read.older_than(seen[server] if server < len(seen) else 0)
                wanted[server] = {number: targets[number] for number in older}
        if any(wanted.values()):
            self._copies.ready()
            self._note(wanted, self._client.read(wanted, unless))

    def read_step(self, at_least: int) -> int:
        """Read everything, of one synchronous step; which that is."""
        self._copies.ready()
        wanted = dict(enumerate(self.targets))
        answers = self._client.read_step(wanted, at_least)
        self._note(wanted, answers)
        return max(answer.step for answer in answers.values())

    def _note(self, wanted: Mapping[int, Mapping[int, torch.Tensor]], answers: Mapping[int, ServerAnswer]) -> None:
        """Values were copied to where they were wanted."""
        changed: set[int] = set()
        for server, answer in answers.items():
            if not wanted.get(server):
                continue
            read = self._read[server]
            if answer.version != read.oldest(wanted[server]):
                changed.update(self._handle_of_slice[number] for number in wanted[server])
            read.note(list(wanted[server]), answer.version)
        self._copies.show(changed)

    # --- writing ------------------------------------------------------------------------------------------------------

    def ready_push(self, pushed: Pushed) -> ReadyPush:
        """Gradients, to be sent with the versions that are held now."""
        return ReadyPush(self._client, pushed, self._read, self._copies)

    def written(self, *, parameters_only: bool = False) -> list[int]:
        """Variables to which the program gave other values by hand."""
        return self._copies.written(parameters_only=parameters_only)

    def keep_written(self) -> None:
        """The servers have what the program wrote."""
        self._copies.keep_written()

    def assign(self, handles: Sequence[int], key: PushKey, *, parameters_only: bool) -> None:
        """Give the servers what the program wrote by hand, as `written` told: of counters, what was added to them."""
        asks: dict[int, Ask] = {}
        for server, parts in self._by_server(handles).items():
            adds = tuple(_is_counter(part.dtype) for part in parts)
            values = [self._written(part) for part in parts]
            numbers = tuple(part.number for part in parts)
            asks[server] = Ask(Assign(self._client.sender, key, numbers, adds), values)
        answers = self._client.exchange(asks)
        self._copies.keep_written(parameters_only=parameters_only)
        for server, (answer, _) in answers.items():
            assigned: Any = asks[server].request
            _note_assigned(self._read[server], assigned, answer)

    def _written(self, part: ServedSlice) -> torch.Tensor:
        own = part.within(self._copies.own(part.handle))
        return own - part.within(self._copies.target(part.handle)) if _is_counter(part.dtype) else own

    def discard_written(self) -> None:
        """What the driver wrote here was written on the servers as well, or was not meant to last."""
        if self._copies.written():
            self.discard()

    def discard(self) -> None:
        """A step failed somewhere: whatever is here is read again."""
        self._copies.drop_written()
        for read in self._read:
            read.forget()

    def close(self) -> None:
        """Let go of memory. May be called twice."""
        self._copies.close()


def _note_assigned(read: ReadVersions, assigned: Assign, answer: ServerAnswer) -> None:
    """Other workers may have added to a counter since it was read: then what is held here is not what it is now."""
    if answer.verdict != "applied":  # as an earlier run of the closure did it: what that wrote is read again
        read.forget(assigned.slices)
        return
    held = [
        number
        for number, adds in zip(assigned.slices, assigned.adds, strict=True)
        if not adds or read.is_of(number, answer.version - 1)
    ]
    note_answer(read, held, answer)


def _is_counter(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
