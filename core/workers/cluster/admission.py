"""Who is let in while a pool starts: its agents, each by the proof that it knows the pool's secret.

The port is open to everybody on its network meanwhile. One thread serves all connections without waiting for
any, and only so many may be unproven: a new one then takes the place of the oldest. So a crowd of strangers
costs neither threads nor descriptors, and an agent, which proves itself at once, passes through it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from .handshake import HANDSHAKE_S, Handshake
from .stream import Stream

_MOST_UNPROVEN = 256
# Connections taken between two looks at those that are there.
_TAKEN_AT_ONCE = 32
_POLL_S = 0.05


class Admission:
    """Takes the connections of agents ``0 .. count - 1``; strangers are turned away, and hold nobody up.

    Args:
        secret: The pool's.
        count: How many agents there are.
    """

    def __init__(self, secret: bytes, count: int) -> None:
        self._secret = secret
        self._count = count
        self._streams: dict[int, Stream] = {}
        # With the time at which they are turned away, the oldest first.
        self._unproven: dict[Handshake, float] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, listener: socket.socket, check: Callable[[int], None]) -> list[Stream]:
        """Return the connections; ``check`` is called meanwhile with the number of those that are missing."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        check_at = 0.0
        try:
            while missing := self._count - len(self._streams):
                for key, _ in self._selector.select(_POLL_S):
                    if key.data is None:
                        self._take(listener)
                    elif key.data in self._unproven:
                        self._proceed(key.data)
                self._turn_late_ones_away()
                if time.monotonic() >= check_at:
                    check(missing)
                    check_at = time.monotonic() + _POLL_S
        except BaseException:
            for stream in self._streams.values():
                stream.close()
            raise
        finally:
            for handshake in list(self._unproven):
                self._turn_away(handshake)
            self._selector.close()
        return [self._streams[number] for number in range(self._count)]

    def _take(self, listener: socket.socket) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                connection = listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._unproven) >= _MOST_UNPROVEN:
                self._turn_away(next(iter(self._unproven)))
            try:
                handshake = Handshake(connection, self._secret)
            except OSError:
                connection.close()
                continue
            self._unproven[handshake] = time.monotonic() + HANDSHAKE_S
            self._selector.register(connection, selectors.EVENT_READ, handshake)

    def _proceed(self, handshake: Handshake) -> None:
        try:
            number = handshake.proceed()
        except OSError:
            self._turn_away(handshake)
            return
        if number is None:
            return
        if number in self._streams or number >= self._count:
            self._turn_away(handshake)
            return
        self._selector.unregister(handshake.connection)
        del self._unproven[handshake]
        self._streams[number] = Stream(handshake.connection)

    def _turn_late_ones_away(self) -> None:
        now = time.monotonic()
        for handshake in [one for one, until in self._unproven.items() if until < now]:
            self._turn_away(handshake)

    def _turn_away(self, handshake: Handshake) -> None:
        del self._unproven[handshake]
        with contextlib.suppress(KeyError):
            self._selector.unregister(handshake.connection)
        handshake.connection.close()
