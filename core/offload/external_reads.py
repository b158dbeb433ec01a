"""What a recorded part of a model reads besides its arguments and weights, and who records it.

A CUDA graph reads fixed memory. Code that takes a tensor from somewhere else (a cached output, say) and is
run inside such a recording has to say where the next one comes from. It asks ``active_reader`` and reads
through that; in ordinary calls there is none.

What this module does not do: it records nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

Fetch = Callable[[Tensor], Tensor | None]


class Reader(Protocol):
    """Somebody who records, or looks at what there is to record."""

    def read(self, source: Tensor, fetch: Fetch) -> Tensor | None:
        """Return the tensor to go on with; None if the caller has to compute it.

        Args:
            source: An argument of the recorded part, on which the tensor depends.
            fetch: Returns the tensor for such an argument, None if it is not there. Called again before every
                replay.
        """
        ...


class _Active(threading.local):
    reader: Reader | None = None


_active = _Active()


def active_reader() -> Reader | None:
    """Return who records in this thread, if anybody does."""
    return _active.reader


@contextmanager
def reading(reader: Reader) -> Iterator[None]:
    """Make ``reader`` the active one in this thread."""
    before, _active.reader = _active.reader, reader
    try:
        yield
    finally:
        _active.reader = before
