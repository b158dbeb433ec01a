"""Messages between the pool and one worker over a socket pair.

A frame is one packet (SOCK_SEQPACKET): a fixed header, a small JSON object of fields, and the
content (see ``protocol``). Content above ``INLINE_LIMIT_BYTES`` travels in the message's buffer, so that a
frame always fits the socket. Tensors travel in shared buffers; a buffer's descriptor is sent once
(SCM_RIGHTS) and its number from then on.

Nothing listens anywhere: the pair exists before the worker does, only the worker inherits its end,
and the end of either process is the end of file for the other.

What this module does not do: it does not know what a call is.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import WorkerError
from .decoding import decode
from .protocol import PROTOCOL_VERSION, PayloadEncoder
from .shared_memory import (
    SMALLEST_BUFFER_BYTES,
    BufferLender,
    BufferMap,
    LentBuffer,
    SharedFile,
    align,
    read_bytes,
)

INLINE_LIMIT_BYTES = 1 << 13
# Below what Linux lets one packet be (a socket buffer, 208 KiB); fields hold at most a traceback.
MAX_FRAME_BYTES = 1 << 17
MAX_FILES = 250  # Linux allows 253 descriptors in one message.
_MAGIC = b"FRRY"
_HEADER = struct.Struct("<4sHHI")  # magic, version, number of descriptors, bytes of fields
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_FILES)
# A receiver that takes nothing for this long, while the frame is small, does not run any more.
_SEND_TIMEOUT_S = 5.0


@dataclass
class Message:
    """One received message.

    Attributes:
        fields: Plain values that steer the exchange, for example ``kind`` and ``call``.
        content: The payload's written form.
        view: The message's buffer, uint8, or None; the sender will not touch it until ``Link.finish``.
        buffer_number: Its number, or None.
        files: Descriptors that are part of the payload.
    """

    fields: dict[str, Any]
    content: bytes
    view: torch.Tensor | None = None
    buffer_number: int | None = None
    files: Sequence[SharedFile] = field(default_factory=list)

    def decode(self, *, copy: bool = True) -> Any:
        """Return the payload; without ``copy`` its tensors are valid until ``Link.finish``."""
        return decode(self.content, self.view, files=self.files, copy=copy)


class Outgoing:
    """Payloads that share one buffer, on their way to one or more links.

    Args:
        encoder: Has encoded ``contents`` and nothing else.
        contents: One for each receiver.
        lender: Where the buffer comes from.
    """

    def __init__(self, encoder: PayloadEncoder, contents: Sequence[bytes], lender: BufferLender) -> None:
        self.contents = list(contents)
        self.files = encoder.files
        self.spilled: list[tuple[int, int] | None] = [None] * len(self.contents)
        size_bytes = encoder.size_bytes
        for index, content in enumerate(self.contents):
            if len(content) > INLINE_LIMIT_BYTES:
                self.spilled[index] = (size_bytes, len(content))
                size_bytes += align(len(content))
        self.buffer: LentBuffer | None = None
        if len(self.files) >= MAX_FILES:
            raise ValueError(f"{len(self.files)} shared files in one message; the limit is {MAX_FILES - 1}")
        if size_bytes:
            self.buffer = lender.lend(size_bytes, len(self.contents))
            try:
                encoder.write_into(self.buffer.view)
                self._spill(self.buffer.view)
            except BaseException:
                lender.take_back([self.buffer.number] * len(self.contents))
                raise

    def _spill(self, view: torch.Tensor) -> None:
        for index, place in enumerate(self.spilled):
            if place is not None:
                data = torch.frombuffer(bytearray(self.contents[index]), dtype=torch.uint8)
                view[place[0] : place[0] + place[1]].copy_(data)
                self.contents[index] = b""


def connect() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection: ours, and the one that a worker inherits."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Link:
    """One end of the connection to one other process.

    ``send`` may be called from any thread; ``receive`` and ``finish`` belong to one thread.

    Args:
        connection: Our end of the socket pair.
        lender: The buffers that our messages are written into.
        writable: Whether received buffers are mapped writable (see ``BufferMap``).
    """

    def __init__(self, connection: socket.socket, lender: BufferLender, *, writable: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.lender = lender
        self._map = BufferMap(writable=writable)
        self._send_lock = threading.Lock()
        self._known: set[int] = set()
        self._finished: deque[int] = deque()

    def send(self, fields: dict[str, Any], outgoing: Outgoing | None = None, index: int = 0) -> None:
        """Send one message.

        Args:
            fields: Small plain values.
            outgoing: The payload, or None.
            index: Which of the payload's contents is for this receiver.

        Raises:
            OSError: If the other process is gone (BrokenPipeError) or does not read (TimeoutError).
        """
        with self._send_lock:
            envelope = dict(fields)
            files: list[SharedFile] = []
            content = b""
            if outgoing is not None:
                content, files = outgoing.contents[index], list(outgoing.files)
                if outgoing.buffer is not None:
                    self._describe_buffer(outgoing.buffer, outgoing.spilled[index], envelope, files)
            finished = [self._finished.popleft() for _ in range(len(self._finished))]
            if finished:
                envelope["finished"] = finished
            forget = self._known - self.lender.numbers()
            if forget:
                self._known -= forget
                envelope["forget"] = sorted(forget)
            self._write(envelope, content, files)

    def receive(self) -> Message | None:
        """Return the next message, or None if none has arrived completely.

        Raises:
            EOFError: If the other process is gone and everything it sent has been read.
            WorkerError: If the other side speaks another version of the protocol.
        """
        received = self._read()
        if received is None:
            return None
        envelope, content, files = received
        self.lender.take_back(envelope.pop("finished", ()))
        self._map.forget(envelope.pop("forget", ()))
        size_bytes = envelope.pop("buffer_bytes", None)
        number = envelope.pop("buffer", None)
        if size_bytes is not None:
            file = files.pop()
            file.size_bytes = size_bytes
            self._map.add(number, file)
            file.close()
        view = None if number is None else self._map.view(number)
        place = envelope.pop("spilled", None)
        if place is not None and view is not None:
            content = read_bytes(view[place[0] : place[0] + place[1]])
        return Message(envelope, content, view, number, files)

    def take(self, message: Message) -> Any:
        """Return a message's payload without copying large tensors out of the buffer, and finish the message.

        The buffer is the sender's again when none of them is left. They may be written to.
        """
        if message.view is None or message.view.numel() <= SMALLEST_BUFFER_BYTES:
            value = message.decode()
            self.finish(message)
            return value
        number, message.buffer_number = message.buffer_number, None
        assert number is not None
        # A deque: appending is safe from whichever thread lets the last tensor go.
        view = self._map.lease(number, self._finished.append)
        return decode(message.content, view, files=message.files, copy=False)

    def finish(self, message: Message) -> None:
        """Give the message's buffer back; the sender learns it with our next message."""
        if message.buffer_number is not None:
            self._finished.append(message.buffer_number)
            message.buffer_number = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until there is something to receive, or the other process is gone."""
        _ready(self.connection, select.POLLIN, timeout_s)

    def close(self) -> None:
        """Close our end."""
        self.connection.close()

    def _describe_buffer(
        self,
        buffer: LentBuffer,
        spilled: tuple[int, int] | None,
        envelope: dict[str, Any],
        files: list[SharedFile],
    ) -> None:
        envelope["buffer"] = buffer.number
        if spilled is not None:
            envelope["spilled"] = spilled
        if buffer.number not in self._known:
            self._known.add(buffer.number)
            envelope["buffer_bytes"] = buffer.file.size_bytes
            files.append(buffer.file)  # The last one: the receiver takes it off again.

    def _write(self, envelope: dict[str, Any], content: bytes, files: Sequence[SharedFile]) -> None:
        head = json.dumps(envelope, separators=(",", ":")).encode("ascii")
        frame = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(files), len(head)) + head + content
        descriptors = struct.pack(f"{len(files)}i", *(file.descriptor for file in files))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if files else []
        until = time.monotonic() + _SEND_TIMEOUT_S
        while True:
            try:
                self.connection.sendmsg([frame], ancillary)  # all of it or nothing
                return
            except BlockingIOError:
                if not _ready(self.connection, select.POLLOUT, until - time.monotonic()):
                    raise TimeoutError(
                        f"the other process has not read a message for {_SEND_TIMEOUT_S:g} s"
                    ) from None

    def _read(self) -> tuple[dict[str, Any], bytes, list[SharedFile]] | None:
        try:
            frame, ancillary, flags, _ = self.connection.recvmsg(
                MAX_FRAME_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        files = [
            SharedFile(descriptor, 0)
            for level, kind, packed in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
            for (descriptor,) in struct.iter_unpack("i", packed[: len(packed) // 4 * 4])
        ]
        if not frame:
            raise EOFError
        magic, version, num_files, head_bytes = _HEADER.unpack_from(frame)
        if magic != _MAGIC or version != PROTOCOL_VERSION:
            raise WorkerError(
                f"the other process speaks version {version} of the worker protocol, this one "
                f"{PROTOCOL_VERSION}: the pack was updated while in use. Restart ComfyUI."
            )
        if flags & socket.MSG_CTRUNC or len(files) != num_files:
            raise WorkerError(
                f"{len(files)} of {num_files} file descriptors arrived: this process has too many files "
                "open. Raise its limit (ulimit -n)."
            )
        head = _HEADER.size + head_bytes
        return json.loads(frame[_HEADER.size : head]), frame[head:], files


def _ready(connection: socket.socket, event: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(connection, event)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
