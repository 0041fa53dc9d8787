"""Whether a coordinator is in a root, as the system itself knows: a lock on <root>/coordinator that ends with its process.

The rule: a coordinator holds it from before its epoch until it has closed its journal, and a command that writes the root
itself looks for it. The address beside says where a coordinator is, and can be removed; the lock is on the directory, so
it cannot be without removing that. Shared, since one coordinator may replace another that still ends.

A network file system keeps locks of directories to one machine, and some have none: there the address alone says it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import time
from typing import Final

from coordinator.wire.beneath import Directory

log = logging.getLogger(__name__)

_ENTER_WITHIN_S: Final = 1.0  # whoever looks holds it for less than that
_AGAIN_S: Final = 0.01


def enter(directory: Directory) -> bool:
    """Be seen for as long as `directory` is open. False where the file system has no such locks. Blocks, shortly."""
    until = time.monotonic() + _ENTER_WITHIN_S
    while True:
        try:
            fcntl.flock(directory.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EINTR) and time.monotonic() < until:
                time.sleep(_AGAIN_S)
                continue
            log.warning(
                "no lock on %s (%s): without its address.json, commands with --root do not see this coordinator",
                directory.path,
                error.strerror,
            )
            return False
        return True


def somebody(directory: Directory) -> bool:
    """Whether a coordinator is seen. False says nothing where the file system has no such locks."""
    try:
        fcntl.flock(directory.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    fcntl.flock(directory.fileno(), fcntl.LOCK_UN)
    return False
