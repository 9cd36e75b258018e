"""Packages: messages that may be large, above all compiled grammars on their way to the actors.

A small package is bytes. A large one is sealed memory of which only the descriptor travels, so that the engine's
process never copies it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import weakref

import msgspec

from guided.constraint import Constraint
from guided.errors import Wire

_SMALL_BYTES = 64 << 10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_IN_MEMORY = b"m"
"""Message that a descriptor comes with."""
_DESCRIPTOR = struct.Struct("i")


class CompileResult(msgspec.Struct, array_like=True, frozen=True):
    """An error, or a compiled grammar: what a compile process sends, and an actor loads."""

    backend: str
    constraint: Constraint
    error: Wire | None = None
    nbytes: int = 0
    """Memory of the grammar in a process that has loaded it, as measured where it was compiled."""
    checked: tuple[str, ...] = ()
    dumped: memoryview = memoryview(b"")
    """The serialized grammar (`CompiledGrammar.dump`): a view into the message, where it was decoded."""


class SealedMemory:
    """A memfd that cannot change any more. Its descriptor is closed with the last reference to this object.

    Raises:
        OSError: the descriptor is of something else, or the memory is empty. The process that sent it may be broken.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the memory of a message is not sealed")
        if not os.fstat(fd).st_size:
            raise OSError("the memory of a message is empty")


Package = bytes | SealedMemory


def seal(content: bytes) -> SealedMemory:
    """Copy a message into sealed memory."""
    fd = os.memfd_create("guided-package", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return SealedMemory(fd)


def buffer(package: Package) -> bytes | mmap.mmap:
    """Return the message. The mapping is private: some kernels refuse a shared one of sealed memory."""
    if isinstance(package, bytes):
        return package
    return mmap.mmap(package.fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)


def receive(stream: socket.socket) -> bytes | mmap.mmap:
    """Receive a message. Raises as `receive_package` does."""
    return buffer(receive_package(stream))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for packages: each one is one message there."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_package(stream: socket.socket, package: Package) -> None:
    """Send a package. Raises OSError as `sendmsg` does."""
    if isinstance(package, bytes):
        if len(package) < _SMALL_BYTES:
            stream.send(package)
            return
        package = seal(package)
    socket.send_fds(stream, [_IN_MEMORY], [package.fd])


def receive_package(stream: socket.socket) -> Package:
    """Receive a package.

    Raises:
        EOFError: the other end is closed.
        OSError: what was received is no package.
    """
    # Without the flag, which `socket.recv_fds` leaves out, a process that is started meanwhile inherits the descriptor.
    size = socket.CMSG_LEN(_DESCRIPTOR.size)
    content, received, _, _ = stream.recvmsg(_SMALL_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    if not content:
        raise EOFError
    if content != _IN_MEMORY:
        return content
    for _, _, descriptor in received:
        return SealedMemory(*_DESCRIPTOR.unpack(descriptor))
    raise OSError("there is no room for another descriptor")
