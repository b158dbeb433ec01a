"""Messages between this machine and a node's agent over one TCP connection.

The same payloads as on one machine (see ``protocol``: data only, never code), but their buffer travels in
the stream. A frame is a fixed header, a JSON object of fields, the written payloads, and the buffer.

The agent connects to a port that only listens while a pool starts (``admission``), and both ends prove that
they know the pool's secret (``handshake``). The frames themselves are neither encrypted nor signed: who can
read or change the traffic between the machines is not kept out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import WorkerError
from ..decoding import decode
from ..protocol import PayloadEncoder
from ..shared_memory import SharedFile

STREAM_VERSION = 1
MAGIC = b"FRRC"
_HEADER = struct.Struct("<4sHxxIQQ")  # magic, version, bytes of fields, of payloads, of the buffer
_MAX_FIELDS_BYTES = 16 << 20
_MAX_PAYLOAD_BYTES = 1 << 30
# A machine that vanished is noticed by the kernel: idle connections are probed every second, and data that
# nobody has confirmed, or taken, for this long ends the connection. For a stopped process its kernel answers.
_LOST_AFTER_MS = 4_000
_PROBE_S = 1


@dataclass
class Frame:
    """One received message.

    Attributes:
        fields: Plain values, for example ``kind`` and ``call``.
        contents: The payloads' written forms.
        buffer: uint8, or None; belongs to the receiver.
    """

    fields: dict[str, Any]
    contents: list[bytes] = field(default_factory=list)
    buffer: torch.Tensor | None = None

    def decode(self, index: int = 0, *, files: Sequence[SharedFile] = (), copy: bool = False) -> Any:
        """Return one payload; without ``copy`` its tensors are views of the buffer."""
        return decode(self.contents[index], self.buffer, files=files, copy=copy)


class Stream:
    """One end of an authenticated connection.

    ``send`` may be called from any thread, ``receive`` from one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._send_lock = threading.Lock()
        connection.settimeout(None)
        watch_for_lost_machine(connection)

    def send(
        self,
        fields: dict[str, Any],
        contents: Sequence[bytes] = (),
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Send one message; ``buffer`` is uint8 on the CPU.

        Raises:
            OSError: If the other side is gone.
        """
        view = memoryview(b"") if buffer is None else _bytes_of(buffer)
        with self._send_lock:
            self._send_head(fields, contents, len(view))
            if len(view):
                self.connection.sendall(view)

    def send_file(self, fields: dict[str, Any], file: SharedFile, offset_bytes: int, num_bytes: int) -> None:
        """Send one message whose buffer is a part of a shared file, without a copy in this process.

        Raises:
            OSError: If the other side is gone.
        """
        with self._send_lock:
            self._send_head(fields, (), num_bytes)
            end = offset_bytes + num_bytes
            while offset_bytes < end:
                offset_bytes += os.sendfile(
                    self.connection.fileno(), file.descriptor, offset_bytes, end - offset_bytes
                )

    def receive(self, buffer_for: Any = None) -> Frame:
        """Return the next message; waits for it.

        Args:
            buffer_for: Called with the fields of a message that has a buffer; returns where it is to
                be written, uint8 of its size, or None for new memory.

        Raises:
            EOFError: If the other side is gone.
            WorkerError: If what comes is no message of this version.
        """
        magic, version, *sizes = _HEADER.unpack(self._read(_HEADER.size))
        if magic != MAGIC or version != STREAM_VERSION:
            raise WorkerError(f"a frame of version {version} came where version {STREAM_VERSION} is spoken")
        num_fields, num_payload, num_buffer = sizes
        if num_fields > _MAX_FIELDS_BYTES or num_payload > _MAX_PAYLOAD_BYTES:
            raise WorkerError(f"a frame of {num_fields} and {num_payload} bytes came, more than any has")
        fields = json.loads(self._read(num_fields))
        lengths = fields.pop("contents")
        contents = [bytes(self._read(length)) for length in lengths]
        if sum(lengths) != num_payload:
            raise WorkerError("a frame came whose payloads do not have the length that it says")
        if not num_buffer:
            return Frame(fields, contents)
        target = None if buffer_for is None else buffer_for(fields)
        if target is None:
            with torch.inference_mode(False):
                target = torch.empty(num_buffer, dtype=torch.uint8)
        if target.numel() != num_buffer:
            raise WorkerError(f"{num_buffer} bytes came for a place of {target.numel()}")
        self._read_into(_bytes_of(target))
        return Frame(fields, contents, target)

    def close(self) -> None:
        """End the connection; also wakes a thread of ours that waits in ``receive`` or ``send``."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _send_head(self, fields: dict[str, Any], contents: Sequence[bytes], num_buffer: int) -> None:
        described = fields | {"contents": [len(content) for content in contents]}
        head = json.dumps(described, separators=(",", ":")).encode("ascii")
        payload = b"".join(contents)
        header = _HEADER.pack(MAGIC, STREAM_VERSION, len(head), len(payload), num_buffer)
        self.connection.sendall(header + head + payload)

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self._read_into(memoryview(data))
        return data

    def _read_into(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self.connection.recv_into(view)
            except (ConnectionError, TimeoutError) as error:
                raise EOFError(str(error)) from error
            except OSError as error:  # closed by ourselves meanwhile
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the connection was closed")
            view = view[count:]


def write_payloads(encoder: PayloadEncoder) -> torch.Tensor | None:
    """Return the buffer of the payloads that ``encoder`` has encoded, None if they have none."""
    if not encoder.size_bytes:
        return None
    with torch.inference_mode(False):
        buffer = torch.empty(encoder.size_bytes, dtype=torch.uint8)
    encoder.write_into(buffer)
    return buffer


def watch_for_lost_machine(connection: socket.socket) -> None:
    """Have the kernel end the connection within seconds once the other machine is gone.

    Sources: tcp(7), TCP_KEEPIDLE and TCP_USER_TIMEOUT; RFC 5482.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER_MS)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 CPU tensor (without NumPy, which PyTorch may lack)."""
    import ctypes

    array = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
