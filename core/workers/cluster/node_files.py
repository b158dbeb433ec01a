"""A node's copies of the parent's shared files: one a node, for all of its ranks.

The parent numbers its files and sends their bytes in parts, straight into the copy. On the parent's own node
there is no copy: the agent opens the very file, if it can and if it is the same one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ..shared_memory import SharedFile


class NodeFiles:
    """The files of one agent, by the parent's numbers. Used by one thread."""

    def __init__(self) -> None:
        self._files: dict[int, SharedFile] = {}
        self._views: dict[int, torch.Tensor] = {}

    def make(self, number: int, num_bytes: int) -> None:
        """Have an own file of this size; if there is one already, it keeps its bytes and grows."""
        if number not in self._files:
            self._files[number] = SharedFile.create("arena", num_bytes)
        elif self._files[number].size_bytes < num_bytes:
            self._files[number].extend(num_bytes)
        self._views[number] = self._files[number].map(writable=True)

    def open(self, number: int, num_bytes: int, path: str, identity: Sequence[int]) -> bool:
        """Use the parent's own file at ``path``; return whether it is there and is the one meant.

        Args:
            number: Its number.
            num_bytes: Its size.
            path: Below the parent's ``/proc``.
            identity: Its device and inode: in a container the path may be another process'.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        file = SharedFile(descriptor, num_bytes)
        found = os.fstat(descriptor)
        if [found.st_dev, found.st_ino] != list(identity) or found.st_size < num_bytes:
            file.close()
            return False
        self._files[number] = file
        return True

    def place(self, fields: dict[str, Any]) -> torch.Tensor | None:
        """Return where a message's buffer belongs, None if it is no part of a file."""
        if fields["kind"] != "part":
            return None
        offset, num_bytes = fields["offset"], fields["num_bytes"]
        return self._views[fields["number"]][offset : offset + num_bytes]

    def named(self, numbers: Sequence[int]) -> list[SharedFile]:
        """Return the files of these numbers."""
        return [self._files[number] for number in numbers]

    def drop(self, number: int) -> None:
        """Let go of a file."""
        self._views.pop(number, None)
        file = self._files.pop(number, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Let go of all files."""
        for number in list(self._files):
            self.drop(number)
