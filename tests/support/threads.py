"""One thread for tiny matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Compute with one thread: more only cost time, and sums in one order make runs comparable."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
