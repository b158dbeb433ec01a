"""Before anything else is read, both ends of a connection prove that they know the pool's secret.

Neither sends it: each proof is an HMAC-SHA256 over both ends' fresh random numbers, and the agent's does not
do for the parent's. Source: RFC 2104, and ISO/IEC 9798-4 mutual authentication.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from ...errors import WorkerError
from .stream import MAGIC, STREAM_VERSION, Stream

SECRET_BYTES = 32
HANDSHAKE_S = 5.0
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct("<4sHH")  # magic, version, the agent's number
_ANSWER_BYTES = _HELLO.size + _NONCE_BYTES + _PROOF_BYTES


class Handshake:
    """The parent's side of one connection, as far as it has come; never waits.

    Args:
        connection: New; nothing was sent yet.
        secret: The pool's.

    Raises:
        OSError: If the other end is gone.
    """

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._answer = b""
        connection.sendall(self._nonce)  # fits what the kernel keeps of a new connection

    def proceed(self) -> int | None:
        """Take what has arrived; return the agent's number once it has proved to be one, None before.

        Raises:
            OSError: If it is none, or gone.
        """
        try:
            part = self.connection.recv(_ANSWER_BYTES - len(self._answer))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionError("the connection was closed")
        self._answer += part
        if len(self._answer) < _ANSWER_BYTES:
            return None
        hello, theirs = self._answer[: _HELLO.size], self._answer[_HELLO.size : -_PROOF_BYTES]
        proof = _proof(self._secret, b"agent", hello, self._nonce, theirs)
        if not hmac.compare_digest(self._answer[-_PROOF_BYTES:], proof):
            raise ConnectionError("the other end does not know the secret")
        magic, version, number = _HELLO.unpack(hello)
        if magic != MAGIC or version != STREAM_VERSION:
            raise ConnectionError(f"the other end speaks version {version}")
        self.connection.sendall(_proof(self._secret, b"parent", hello, self._nonce, theirs))
        return number


def introduce(connection: socket.socket, secret: bytes, number: int) -> Stream:
    """Prove to the other end that this is agent ``number`` of its pool, and have it prove itself.

    Raises:
        WorkerError: If the other end does not know the secret.
        OSError: If it is gone.
        EOFError: Likewise.
    """
    connection.settimeout(HANDSHAKE_S)
    theirs = _exactly(connection, _NONCE_BYTES)
    hello, ours = _HELLO.pack(MAGIC, STREAM_VERSION, number), secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(hello + ours + _proof(secret, b"agent", hello, theirs, ours))
    if not hmac.compare_digest(
        _exactly(connection, _PROOF_BYTES), _proof(secret, b"parent", hello, theirs, ours)
    ):
        raise WorkerError("what answers at the address of ComfyUI does not know this pool's secret")
    return Stream(connection)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(
        secret, b"".join(struct.pack("<I", len(part)) + part for part in parts), hashlib.sha256
    )


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data
