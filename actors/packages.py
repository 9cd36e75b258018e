"""Packages: messages that may be large, above all compiled grammars on their way to the
actors.

A small package is bytes. A large one is sealed memory of which only the descriptor
travels, so that the engine's process never copies it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import struct
import weakref

import msgspec

from guided.constraint import Constraint
from guided.errors import Wire

_log = logging.getLogger(__name__)
_SMALL_BYTES = 64 << 10
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
)
_IN_MEMORY = b"m"
"""Message that a descriptor comes with."""
_DESCRIPTOR = struct.Struct("i")


class CompileResult(msgspec.Struct, array_like=True, frozen=True):
    """An error, or a compiled grammar: what a compile process sends, and an actor
    loads."""

    backend: str
    constraint: Constraint
    error: Wire | None = None
    nbytes: int = 0
    """Memory of the grammar in a process that has loaded it, as measured where it was
    compiled."""
    checked: tuple[str, ...] = ()
    dumped: memoryview = memoryview(b"")
    """The serialized grammar (`CompiledGrammar.dump`): a view into the message, where
    it was decoded."""


class InvalidPackage(OSError):
    """What was received is no package: the process that sent it may be broken, or this
    one has no free descriptor."""


class SealedMemory:
    """A memfd that cannot change any more. Its descriptor is closed with the last
    reference to this object.

    Raises:
        InvalidPackage: the descriptor is of something else, or the memory is empty.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # it is no memfd
            is_sealed = False
        if not is_sealed or not os.fstat(fd).st_size:
            raise InvalidPackage("the memory of a message is not sealed, or empty")


Package = bytes | SealedMemory


def seal(content: bytes) -> SealedMemory:
    """Copy a message into sealed memory."""
    fd = os.memfd_create("guided-package", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return SealedMemory(fd)


def packed(package: Package) -> Package:
    """Return a package, in sealed memory if it is large."""
    if isinstance(package, SealedMemory) or len(package) < _SMALL_BYTES:
        return package
    return seal(package)


def buffer(package: Package) -> bytes | mmap.mmap:
    """Return the message. The mapping is private: some kernels refuse a shared one of
    sealed memory."""
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
    package = packed(package)
    if isinstance(package, bytes):
        stream.send(package)
    else:
        socket.send_fds(stream, [_IN_MEMORY], [package.fd])


def receive_descriptor(stream: socket.socket) -> tuple[bytes, int]:
    """Receive a message, and the descriptor that came with it; -1 if there is none.

    Raises:
        EOFError: the other end is closed.
    """
    # Without the flag, which `socket.recv_fds` leaves out, a process that is started
    # meanwhile inherits the descriptor.
    size = socket.CMSG_LEN(_DESCRIPTOR.size)
    content, received, _, _ = stream.recvmsg(
        _SMALL_BYTES, size, socket.MSG_CMSG_CLOEXEC
    )
    if not content:
        raise EOFError
    for _, _, descriptor in received:
        return content, *_DESCRIPTOR.unpack(descriptor)
    return content, -1


def receive_package(stream: socket.socket) -> Package:
    """Receive a package.

    Raises:
        EOFError: the other end is closed.
        InvalidPackage: see there.
    """
    content, fd = receive_descriptor(stream)
    if fd >= 0:
        return SealedMemory(fd)
    if content == _IN_MEMORY:
        raise InvalidPackage("there is no room for another descriptor")
    return content


def receive_grammar(stream: socket.socket) -> Package:
    """Receive a grammar. In the place of an invalid package there is an empty one: only
    that grammar has an error."""
    try:
        return receive_package(stream)
    except InvalidPackage as error:
        _log.warning("a grammar was not received: %s", error)
        return b""
