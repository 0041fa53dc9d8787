"""One process at a time, by the lock of a file.

The rule: nobody waits for it, and nobody has to give it back: it is held for as long as the descriptor is open, so that it ends
with the process however that ends. A program that is started by the process does not inherit it; a process that is forked off and
runs on does. The file stays; what is in it is its holder's to write.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from coordinator.wire.beneath import storage_error
from coordinator.wire.errors import Reason, refuse


def hold(path: Path) -> int | None:
    """The descriptor that holds the lock of a file, made when it is not there (mode 0600); None while another holds it.

    Raises STORAGE_* when the file cannot be opened or its file system has no locks: nothing is held then.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise storage_error(error, f"opening {path}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EWOULDBLOCK:
            return None
        raise refuse(
            Reason.STORAGE_FAILED, f"{path} cannot be locked: {error.strerror}.",
            next_step="Use a directory of a local disk there, whose file system has locks.",
        ) from error  # fmt: skip
    return descriptor
