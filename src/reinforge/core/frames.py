"""Messages over a stream socket between two of our own processes: a length of four bytes, then the
body.
"""

from __future__ import annotations

import socket
import struct

HEAD = struct.Struct(">I")
PIECE = 1 << 20


def frame(body: bytes) -> bytes:
    return HEAD.pack(len(body)) + body


def read_frame(channel: socket.socket) -> bytes:
    """The next body. Raises EOFError when the other side has gone."""
    (length,) = HEAD.unpack(_exactly(channel, HEAD.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(PIECE, length - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
