"""Being told to stop, and being alone: signals and the lock on an output folder."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import CalibrationError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on the signal that the terminal has sent already; only one that comes later is a second request.
REPEAT_SECONDS = 3.0


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and has saved its state.

    Attributes:
        exit_code (`int`): What a shell expects, 130 for Ctrl-C and 143 for SIGTERM.
    """

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class StopRequest:
    """Notes SIGINT and SIGTERM while it is entered, so that a run can stop where its state is whole.

    A second signal some seconds later does not wait. Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is not None and now - self._since > REPEAT_SECONDS:
            raise Interrupted(signum)
        if self.signum is None:
            self.signum, self._since = signum, now

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def check(self) -> None:
        """Stop here if that was asked for.

        Raises:
            Interrupted: it was.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)


class FolderLock:
    """Keeps a second run out of a folder; the operating system gives it back when the process ends, however it ends.

    Args:
        path: The lock file; its folder has to exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CalibrationError: another run has it; says which.
        """
        file = open(self.path, "a+", encoding="utf-8")
        try:
            _lock(file)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise CalibrationError(
                f"Another run ({holder}) is working in {self.path.parent.parent}. Wait for it, stop it, or use "
                "another output folder."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.release()


def _lock(file: Any) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


__all__ = ["FolderLock", "Interrupted", "StopRequest"]
