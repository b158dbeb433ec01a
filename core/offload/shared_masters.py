"""Host memory for masters that several processes map: one copy of the weights for all of them.

The process that made it fills it; the others find the same weights there and copy nothing. Each process
pins its own mapping. All frozen parameters go there, also those of a unit with trained weights or buffers
in it: these, which one process may change, stay in its own memory and move in a copy of their own. An
in-place change of a shared parameter reaches every process.

The first page holds a digest of the layout and says whether the weights are in, so that a process with
another model, or one that comes too early, is refused.

What this module does not do: it starts no process and sends no message; how the handle gets to another
process is the caller's business.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections.abc import Sequence

from ..errors import OffloadError, RequestError

_MAGIC = b"FERRYHM1"
_DIGEST_BYTES = 32
_FILLED_AT = len(_MAGIC) + _DIGEST_BYTES


class SharedMasters:
    """A memory file; make one with ``create``, or with ``open`` in another process.

    Args:
        descriptor: Of a file in memory (a memfd); it belongs to this object now.
        is_filled: Whether another process has put the weights in.
    """

    def __init__(self, descriptor: int, *, is_filled: bool) -> None:
        self.descriptor = descriptor
        self.is_filled = is_filled
        self._end = mmap.PAGESIZE
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls) -> SharedMasters:
        """Return new memory, to be filled by the first manager that uses it."""
        descriptor = os.memfd_create("ferry-masters")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor, is_filled=False)

    @property
    def handle(self) -> str:
        """A path by which another process of the same user can ``open`` it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @classmethod
    def open(cls, handle: str) -> SharedMasters:
        """Return the memory that another process made and has filled.

        Raises:
            RequestError: If it is not there any more, or not filled yet.
        """
        try:
            descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
            memory = cls(descriptor, is_filled=True)
            header = os.pread(descriptor, _FILLED_AT + 1, 0)
        except (OSError, TypeError) as error:
            raise RequestError(
                f"the shared weights {handle!r} were asked",
                limit=f"They cannot be opened ({error}); they go with the process that made them",
                way_out="Open them while it lives, as the same user",
            ) from error
        if header[: len(_MAGIC)] != _MAGIC or header[_FILLED_AT:] != b"\x01":
            raise RequestError(
                f"the shared weights {handle!r} were asked",
                limit="No OffloadTrainingManager has filled them yet",
                way_out="Attach in the process that made them first, and tell the others when that is done",
            )
        return memory

    def begin(self, layout: Sequence[tuple[str, int]]) -> None:
        """Say what is about to be put in, or found: name and size of every bucket in order.

        Raises:
            OffloadError: If other things are in, or it is in use by another manager.
        """
        if self._end != mmap.PAGESIZE:
            raise OffloadError(
                "These shared weights are in use by another OffloadTrainingManager. Make or open them anew."
            )
        digest = hashlib.blake2b(repr(list(layout)).encode(), digest_size=_DIGEST_BYTES).digest()
        if not self.is_filled:
            os.pwrite(self.descriptor, _MAGIC + digest + b"\x00", 0)
        elif os.pread(self.descriptor, _DIGEST_BYTES, len(_MAGIC)) != digest:
            raise OffloadError(
                "The shared weights are those of another model, or were split in another way. Every process "
                "needs the same model, trainable layers and split threshold."
            )

    def finish(self) -> None:
        """Say that the weights are in."""
        if not self.is_filled:
            os.pwrite(self.descriptor, b"\x01", _FILLED_AT)

    def reserve(self, nbytes: int) -> mmap.mmap:
        """Map the next ``nbytes``."""
        start = self._end
        self._end += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if not self.is_filled:
            os.ftruncate(self.descriptor, self._end)
        return mmap.mmap(self.descriptor, nbytes, offset=start)
