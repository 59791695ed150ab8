"""Shared-memory transfer: whole or not at all, private, digested, and nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as np_arrays

from opengyre.errors import TransferError
from opengyre.transfer.arrays import BFLOAT16, digest_of, layout_of, pieces, size_of, unpack
from opengyre.transfer.base import Ref
from opengyre.transfer.shared_memory import PREFIX, SharedMemoryTransfer, default_root, sweep


@pytest.fixture
def transfer(tmp_path):
    made = SharedMemoryTransfer("run", root=tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def some(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(3, 5)).astype(np.float32),
        "scalar": np.float64(3.5),
        "empty": np.empty((0, 4), np.int64),
        "mask": rng.random(7) > 0.5,
        "half": rng.normal(size=9).astype(np.float16),
        "bf16": rng.integers(0, 1 << 16, (2, 3), dtype=np.uint16).view(BFLOAT16),
        "strided": np.arange(24).reshape(4, 6)[::2, ::3],
        "big endian": np.arange(5, dtype=">f8"),
    }


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.shape(a[name]) == b[name].shape and np.array_equal(a[name], b[name])


def test_round_trip(transfer):
    ref = transfer.put("weights/1", some())
    got = transfer.get(ref)
    same(some(), got)
    assert got["bf16"].dtype == BFLOAT16 and dict((n, d) for n, d, _ in ref.layout)["bf16"] == "bfloat16"
    assert all(v.flags.writeable for v in got.values())


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=50, deadline=None)
@given(st.lists(np_arrays(st.sampled_from([np.int8, np.float32, np.int64]), SHAPES), max_size=4))
def test_bytes_and_back(given_arrays):
    named = {str(i): a for i, a in enumerate(given_arrays)}
    layout = layout_of(named)
    blob = np.frombuffer(b"".join(pieces(named)), np.uint8)
    assert len(blob) == size_of(layout)
    for name, array in unpack(layout, blob).items():
        assert array.tobytes() == named[name].tobytes() and array.shape == named[name].shape


def test_digest_covers_names_types_shapes_and_bytes():
    a = np.arange(6, dtype=np.int32)
    variants = [{"a": a}, {"b": a}, {"a": a.view(np.uint32)}, {"a": a.reshape(2, 3)}, {"a": a + 1}]
    assert len({digest_of(layout_of(v), pieces(v)) for v in variants}) == len(variants)


def test_copies_are_private(transfer):
    """X10: a reader's array is its own; dropping or changing the stored bytes does not reach it."""
    source = some()
    ref = transfer.put("k", source)
    first, second = transfer.get(ref), transfer.get(ref)
    first["w"][:] = 0
    source["w"][:] = 7
    transfer.drop("k")
    same(second, some())


def test_success_means_the_bytes_arrived(transfer):
    """X04: send, randomise the receiver, send again: equal; every kind of damage is an error, never an array."""
    weights = some()
    receiver = transfer.get(transfer.put("v1", weights))
    receiver["w"][:] = np.random.default_rng(1).normal(size=(3, 5))
    ref = transfer.put("v2", weights)
    receiver.update(transfer.get(ref))
    assert digest_of(layout_of(receiver), pieces(receiver)) == ref.digest
    path = transfer.folder / "k-v2"
    whole = path.read_bytes()
    damaged = {
        "short": whole[:-64],  # a bucket that never came
        "long": whole + b"\0" * 64,
        "one bit": bytes([whole[0] ^ 1]) + whole[1:],
        "zeroed": bytes(len(whole)),
        "empty": b"",
    }
    for data in damaged.values():
        path.write_bytes(data)
        with pytest.raises(TransferError, match="v2"):
            transfer.get(ref)
    path.write_bytes(whole)
    same(transfer.get(ref), weights)
    for wrong in (
        Ref(ref.key, ref.nbytes, "00" * 16, ref.layout),
        Ref(ref.key, ref.nbytes, ref.digest, [(n, d, s) for n, d, s in ref.layout if n != "w"]),
        Ref(ref.key, ref.nbytes, ref.digest, [("w2" if n == "w" else n, d, s) for n, d, s in ref.layout]),
        Ref("absent", ref.nbytes, ref.digest, ref.layout),
        Ref(ref.key, ref.nbytes, ref.digest, [*ref.layout[:-1], ("x", "object", [1])]),
    ):
        with pytest.raises(TransferError):
            transfer.get(wrong)


def test_written_once(transfer):
    transfer.put("k", some())
    with pytest.raises(TransferError, match="written once"):
        transfer.put("k", some(1))
    same(transfer.get(transfer.put("k2", some(1))), some(1))
    transfer.drop("k")
    transfer.drop("k")
    transfer.put("k", some(2))


@pytest.mark.parametrize("key", ["../../etc/passwd", "a/b", ".", "..", ".owner", "ü ", "x" * 100])
def test_any_key_stays_in_the_folder(transfer, key):
    ref = transfer.put(key, some())
    same(transfer.get(ref), some())
    assert (
        sorted(p.name for p in transfer.folder.iterdir())[0] == ".owner" and len(list(transfer.folder.iterdir())) == 2
    )
    transfer.drop(key)


def test_refuses_what_is_not_numbers(transfer):
    for bad in (np.array([object()]), np.array(["text"]), np.zeros(2, [("a", "i4"), ("b", "i4")])):
        with pytest.raises(TransferError, match="plain numbers"):
            transfer.put("k", {"bad": bad})
    assert [p.name for p in transfer.folder.iterdir()] == [".owner"]


def test_no_room_leaves_nothing(transfer):
    """X09: a write that cannot finish raises, with its size, and what it had written is gone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(TransferError, match=r"400000 bytes not written.*free"):
            transfer.put("k", {"w": np.zeros(50_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in transfer.folder.iterdir()] == [".owner"]
    transfer.put("k", {"w": np.zeros(50_000)})  # and the key is still free


def test_memory_is_flat():
    """X10: memory and files after 50 put/get/drop rounds are what they were after 5."""
    with_shm = SharedMemoryTransfer(f"flat-{os.getpid()}")
    payload = {"w": np.zeros(1 << 18)}  # 2 MiB
    sizes = []
    for n in range(50):
        ref = with_shm.put(f"k{n}", payload)
        with_shm.get(ref)
        with_shm.drop(ref.key)
        sizes.append(psutil.Process().memory_info().rss)
        assert len(list(with_shm.folder.iterdir())) == 1
    with_shm.close()
    assert not with_shm.folder.exists() and with_shm.folder.parent == default_root()
    assert max(sizes[-10:]) - max(sizes[:5]) < 1 << 20


CHILD = """
    import os, signal, sys
    import numpy as np
    from pathlib import Path
    from opengyre.transfer.shared_memory import SharedMemoryTransfer
    t = SharedMemoryTransfer(sys.argv[2], root=Path(sys.argv[1]))
    t.put("k", {"w": np.zeros(10)})
    print("ready", flush=True)
    signal.pause()
"""


def test_folders_of_dead_runs_are_swept(tmp_path):
    def child(run: str) -> subprocess.Popen:
        argv = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), run]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    dead, alive = child("dead"), child("alive")
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert (tmp_path / f"{PREFIX}dead" / "k-k").exists()  # shared memory outlives its process
        (tmp_path / f"{PREFIX}strange").mkdir()
        (tmp_path / f"{PREFIX}reused").mkdir()
        (tmp_path / f"{PREFIX}reused" / ".owner").write_text(f"{os.getpid()} 1")  # an id now used by another process
        mine = SharedMemoryTransfer("mine", root=tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"{PREFIX}{n}" for n in ("alive", "mine", "strange")]
        assert sweep(tmp_path) == []
        with pytest.raises(TransferError, match=f"process {alive.pid} owns it"):
            SharedMemoryTransfer("alive", root=tmp_path)
        mine.close()
    finally:
        alive.kill()
        alive.wait()


def test_another_process_reads_and_does_not_own(tmp_path):
    owner = SharedMemoryTransfer("run", root=tmp_path)
    guest = SharedMemoryTransfer("run", owner=False, root=tmp_path)
    ref = guest.put("from guest", some())
    guest.close()
    same(owner.get(ref), some())
    owner.close()
    with pytest.raises(TransferError, match="cannot be read"):
        guest.get(ref)
    with pytest.raises(TransferError, match="not written"):
        guest.put("late", some())


def test_without_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    assert default_root() == Path(__import__("tempfile").gettempdir())
