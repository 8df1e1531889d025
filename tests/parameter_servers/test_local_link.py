from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raydist.parameter_servers.desk import ServerDesk
from raydist.parameter_servers.link import ServerLink
from raydist.parameter_servers.local_link import LocalDoor, LocalLink
from tests.contracts.server_link import ServerLinkContract
from tests.parameter_servers.plain_server import PlainServer


class TestLocalLink(ServerLinkContract):
    @contextmanager
    def links(self, count: int) -> Iterator[list[ServerLink]]:
        server, lock = PlainServer(), threading.Lock()
        desk = ServerDesk(server)
        made: list[ServerLink] = [LocalDoor(LocalLink(desk, lock)).open() for _ in range(count)]
        yield made
        for link in made:
            link.close()
        server.close()
