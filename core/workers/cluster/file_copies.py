"""Which bytes of this process' shared files each node has; brings what is missing, to all nodes at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import RequestError, WorkerError
from ..shared_memory import SharedFile
from .node_link import NodeLink, NodeSilentError

_PART_BYTES = 8 << 20
_POLL_S = 0.05


@dataclass
class _Copy:
    """What one node has of one file: its first ``num_bytes``, as they were at ``version``."""

    version: int
    num_bytes: int = 0
    shared: bool = False


class FileCopies:
    """The files of one pool and their copies.

    Args:
        links: The nodes.
    """

    def __init__(self, links: Sequence[NodeLink]) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._next_number = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[SharedFile, int] = weakref.WeakKeyDictionary()
        self._copies: dict[tuple[int, int], _Copy] = {}  # by node and file
        # Filled by finalizers, which may run anywhere: only a SimpleQueue may be used there.
        self._dead: queue.SimpleQueue[int] = queue.SimpleQueue()

    def bring(
        self, files: Sequence[SharedFile], links: Sequence[NodeLink], poll: Callable[[], object] | None
    ) -> list[int]:
        """Have every one of ``links`` hold ``files`` as they are now; return their numbers.

        Args:
            files: Files of this process; nobody writes them meanwhile.
            links: The nodes that need them.
            poll: Called meanwhile; what it raises stops the sending, which goes on from there next time.

        Raises:
            RequestError: If a node has no memory for them; nothing was sent then.
            WorkerError: If a node is there and does not answer; it may be asked again.
        """
        with self._lock:
            self._drop_dead()
            numbers = [self._number(file) for file in files]
            missing = {
                link.number: [pair for pair in zip(numbers, files, strict=True) if self._lacks(link, *pair)]
                for link in links
            }
            for link in links:
                self._check_room(link, missing[link.number])
            self._send_all([(link, missing[link.number]) for link in links if missing[link.number]], poll)
            return numbers

    def _send_all(
        self,
        work: Sequence[tuple[NodeLink, list[tuple[int, SharedFile]]]],
        poll: Callable[[], object] | None,
    ) -> None:
        stop = threading.Event()
        silent: list[str] = []
        senders = [
            threading.Thread(
                target=self._send, args=(link, files, stop, silent), name="ferry-weights", daemon=True
            )
            for link, files in work
        ]
        for sender in senders:
            sender.start()
        try:
            for sender in senders:
                while sender.is_alive():
                    if poll is not None:
                        poll()
                    sender.join(_POLL_S)
        finally:
            stop.set()
            for sender in senders:
                sender.join()
        if silent:
            raise WorkerError(f"the weights could not be brought to every node: {'; '.join(silent)}")

    def _send(
        self, link: NodeLink, files: list[tuple[int, SharedFile]], stop: threading.Event, silent: list[str]
    ) -> None:
        # A node that goes meanwhile is noticed by who reads its connection.
        with contextlib.suppress(OSError, EOFError):
            for number, file in files:
                try:
                    copy = self._announce(link, number, file, stop)
                except NodeSilentError as error:
                    silent.append(str(error))
                    return
                while not copy.shared and copy.num_bytes < file.size_bytes and not stop.is_set():
                    size = min(_PART_BYTES, file.size_bytes - copy.num_bytes)
                    fields = {"kind": "part", "number": number, "offset": copy.num_bytes, "num_bytes": size}
                    link.stream.send_file(fields, file, copy.num_bytes, size)
                    copy.num_bytes += size

    def _announce(self, link: NodeLink, number: int, file: SharedFile, stop: threading.Event) -> _Copy:
        copy = self._copies.setdefault((link.number, number), _Copy(file.version))
        if copy.version != file.version:
            copy.version, copy.num_bytes = file.version, 0
        fields = {"kind": "file", "number": number, "num_bytes": file.size_bytes}
        if link.share.here:
            found = os.fstat(file.descriptor)
            path = f"/proc/{os.getpid()}/fd/{file.descriptor}"
            asked = fields | {"path": path, "identity": [found.st_dev, found.st_ino]}
            answer = link.ask(asked, stop=stop)
            copy.shared = answer["shared"]
        if copy.shared:
            copy.num_bytes = file.size_bytes
        else:
            link.stream.send(fields | {"path": None})
        return copy

    def _lacks(self, link: NodeLink, number: int, file: SharedFile) -> bool:
        copy = self._copies.get((link.number, number))
        if copy is None or copy.num_bytes < file.size_bytes:
            return True
        return not copy.shared and copy.version != file.version

    def _check_room(self, link: NodeLink, files: Sequence[tuple[int, SharedFile]]) -> None:
        new = [file for number, file in files if (link.number, number) not in self._copies]
        needed = 0 if link.share.here else sum(file.size_bytes for file in new)
        if needed > link.available_bytes:
            raise RequestError(
                f"weights of {needed / (1 << 30):.1f} GiB were to be sent to node {link.share.address}",
                limit=f"{link.available_bytes / (1 << 30):.1f} GiB of its host memory are available",
                way_out="Close other programs there, or use a smaller file of the model (fp8)",
            )

    def _number(self, file: SharedFile) -> int:
        if file not in self._numbers:
            self._numbers[file] = number = next(self._next_number)
            weakref.finalize(file, self._dead.put, number).atexit = False
        return self._numbers[file]

    def drop_dead(self) -> None:
        """Have the nodes let go of files that this process has let go of."""
        if self._lock.acquire(blocking=False):  # else somebody sends, and will do it
            try:
                self._drop_dead()
            finally:
                self._lock.release()

    def _drop_dead(self) -> None:
        while not self._dead.empty():
            number = self._dead.get()
            for link in self._links:
                if self._copies.pop((link.number, number), None) is not None:
                    with contextlib.suppress(OSError):
                        link.stream.send({"kind": "drop", "number": number})
