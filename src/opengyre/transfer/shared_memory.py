"""Arrays between the processes of one host, through files in shared memory.

    put:  bytes ──▶ <key>.<random>.tmp ──rename──▶ <key>        a reader sees all of it or nothing
    get:  <key> ──▶ private memory ──digest──▶ arrays           what was hashed is what is returned

One folder a run. It holds the owner's process id, so that a later run can sweep the folder of a run that was killed:
shared memory outlives its processes, and a leak there is a leak until reboot. There are no background threads, pools or
mapped buffers: memory after any number of put/drop pairs is what it was before.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from opengyre.errors import TransferError
from opengyre.transfer.arrays import digest_of, layout_of, pieces, size_of, unpack
from opengyre.transfer.base import Ref

PREFIX = "opengyre-"
PID_FILE = ".owner"  # no key can have this name: quoting leaves no leading dot


def default_root() -> Path:
    """Memory-backed where the system has it, else the ordinary place for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class SharedMemoryTransfer:
    """Keyed, write-once arrays under ``<root>/opengyre-<run_id>/``.

    Args:
        run_id: names the folder; every process of a run uses the same.
        owner: True in the process that outlives the others. It makes the folder, sweeps folders of dead runs, and its
            ``close`` removes everything. Other processes only read and write; their ``close`` does nothing.
        root: parent folder; default ``/dev/shm``.
    """

    def __init__(self, run_id: str, *, owner: bool = True, root: Path | None = None) -> None:
        self._root = default_root() if root is None else root
        self._folder = self._root / f"{PREFIX}{quote(run_id, safe='')}"
        self._owner = owner
        if owner:
            sweep(self._root)
            self._take_folder()

    def _take_folder(self) -> None:
        own, owner_file = _identity(os.getpid()), self._folder / PID_FILE
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if owner_file.exists() and owner_file.read_text() != own:  # a dead one's would have been swept
            pid = owner_file.read_text().partition(" ")[0]
            raise TransferError(f"process {pid} owns it", where=str(self._folder), right="a run id of its own per run")
        owner_file.write_text(own)

    @property
    def folder(self) -> Path:
        """Where the bytes are."""
        return self._folder

    def put(self, key: str, arrays: Mapping[str, Any]) -> Ref:
        """Store numpy arrays under ``key``; visible to others only when complete.

        Raises:
            TransferError: the key is taken, an array is not plain numbers, or there is no room (nothing is left).
        """
        path = self._path(key)
        if path.exists():
            raise TransferError("is already stored", where=f"key {key!r}", right="keys are written once; drop it first")
        try:
            layout = layout_of({name: np.asarray(array) for name, array in arrays.items()})
            nbytes = size_of(layout)
        except TransferError as error:
            raise TransferError(error.what, where=f"key {key!r}", right="plain numbers") from None
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb", buffering=0) as file:
                digest = digest_of(layout, _teed(pieces(arrays), file))
            os.link(temporary, path)  # unlike rename, refuses a key that appeared meanwhile
        except FileExistsError:
            raise TransferError("is already stored", where=f"key {key!r}", right="keys are written once") from None
        except OSError as error:
            raise TransferError(
                f"{nbytes} bytes not written: {error.strerror}", where=f"key {key!r}", right=f"free {self._root}"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        return Ref(key=key, nbytes=nbytes, digest=digest, layout=layout)

    def get(self, ref: Ref) -> dict[str, Any]:
        """Private copies of the arrays. Raises TransferError when absent, short, or other bytes than promised."""
        where = f"key {ref.key!r}"
        try:
            data = np.fromfile(self._path(ref.key), dtype=np.uint8)
        except OSError as error:
            raise TransferError(f"cannot be read: {error.strerror}", where=where) from None
        if not len(data) == ref.nbytes == size_of(ref.layout):
            raise TransferError(f"{len(data)} bytes arrived", where=where, right=f"{ref.nbytes} were promised")
        if digest_of(ref.layout, [data.data]) != ref.digest:
            raise TransferError("the bytes are not those that were promised", where=where, right=f"digest {ref.digest}")
        return dict(unpack(ref.layout, data))

    def drop(self, key: str) -> None:
        """Forget ``key``; absent keys are fine."""
        self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Owner only: remove everything this run stored."""
        if self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self._folder / ("k-" + quote(key, safe=""))


def sweep(root: Path) -> list[Path]:
    """Remove the folders of runs whose owner is dead, and return them. Folders without an owner file are left alone."""
    swept = []
    for folder in root.glob(f"{PREFIX}*"):
        try:
            identity = (folder / PID_FILE).read_text()
            alive = _identity(int(identity.partition(" ")[0])) == identity
        except (OSError, ValueError):
            continue  # not ours to judge: another user's, or being made right now
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
    return swept


def _identity(pid: int) -> str:
    """Process id and start time, since ids are reused; empty for a dead process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _identity_without_proc(pid)
    return f"{pid} {stat.rpartition(')')[2].split()[19]}"  # field 22 of proc(5) stat: start time in clock ticks


def _identity_without_proc(pid: int) -> str:
    if Path("/proc/self").exists():
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return f"{pid} unknown"


def _teed(data: Any, file: Any) -> Any:
    """Write each piece and pass it on, so that what is hashed is what was written."""
    for piece in data:
        view = memoryview(piece)
        while view:  # a raw write may be short
            view = view[file.write(view) :]
        yield piece
