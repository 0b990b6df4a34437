"""Hosts: a file for the CPU, pinned memory for a GPU; what goes comes back as it was, whatever happens meanwhile."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from profiler.measuring.hosts import CudaHost, FileHost, HostError, Move, View, host_for
from profiler.measuring.link_speed import measured_link

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def there_and_back(host, *tensors):
    move = Move(host, tensors[0])
    move.away(tensors)
    move.fetch()
    return move.back()


VIEWS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "a part": lambda t: t[1:, ::2],
    "another type": lambda t: t.view(torch.int32),
    "complex": lambda t: torch.view_as_complex(t.view(2, 3, 2)),
    "conjugated": lambda t: torch.view_as_complex(t.view(2, 3, 2)).conj(),
    "negated": lambda t: torch.view_as_complex(t.view(2, 3, 2)).conj().imag,
    "expanded": lambda t: t[:1].expand(5, 6),
    "a number": lambda t: t[1, 2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back_as_the_view_it_was(tmp_path, name):
    base = torch.randn(2, 6)
    view = VIEWS[name](base)
    expected, form = view.clone(), View.of(view)
    back_base, back = there_and_back(FileHost(tmp_path), base, view)
    assert torch.equal(back, expected)
    assert View.of(back) == form
    assert back.untyped_storage().data_ptr() == back_base.untyped_storage().data_ptr()
    assert back.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.int64])
def test_every_type_comes_back_bit_for_bit(tmp_path, dtype):
    tensor = torch.randint(0, 2, (1000,)).to(dtype)
    (back,) = there_and_back(FileHost(tmp_path), tensor)
    assert torch.equal(back, tensor)
    assert back.dtype is dtype


def test_nothing_holds_the_memory_of_what_is_away(tmp_path):
    host, tensor = FileHost(tmp_path), torch.ones(100)
    storage = tensor.untyped_storage()
    move = Move(host, tensor)
    move.away([tensor])
    del tensor
    gc.collect()
    holders = [o for o in gc.get_referrers(storage) if isinstance(o, torch.Tensor)]
    assert holders == []
    assert sys.getrefcount(storage) == 2


def test_a_move_can_come_back_twice(tmp_path):
    tensor = torch.randn(10)
    move = Move(FileHost(tmp_path), tensor)
    move.away([tensor])
    move.fetch()
    (first,), (second,) = move.back(), move.back()
    assert torch.equal(first, tensor)
    assert torch.equal(second, tensor)
    assert first.data_ptr() != second.data_ptr()


def test_buffers_are_used_again_and_no_file_has_a_name(tmp_path):
    host = FileHost(tmp_path)
    host.reserve([400, 400, 80])
    made = {size: [id(f) for f in files] for size, files in host._free.items()}
    for _ in range(3):
        there_and_back(host, torch.ones(100))
    assert {size: sorted(map(id, files)) for size, files in host._free.items()} == {
        size: sorted(ids) for size, ids in made.items()
    }
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_nobody_holds_any_more_has_closed_its_files(tmp_path):
    host = FileHost(tmp_path)
    host.reserve([80])
    (idle,) = host._free[80]
    moved = Move(host, torch.ones(10, dtype=torch.float64))
    del host
    assert not idle.closed  # the move holds the host
    moved.away([])
    del moved
    gc.collect()
    assert idle.closed


def test_buffers_of_other_sizes_go_where_the_budget_has_no_room_for_them(tmp_path):
    host = FileHost(tmp_path)
    host.budget_bytes = 100
    for sizes in ([60, 40], [30, 30, 30], [60, 40, 60]):
        host.reserve(sizes)
        assert sum(os.fstat(file.fileno()).st_size for file in host._files) <= 100
    in_use = [host.take(60), host.take(40)]
    with pytest.raises(HostError, match=r"100 B are on the host and 1 B more .*raise host_budget"):
        host.take(1)
    host.give_back(in_use.pop())
    assert host.take(1)


def test_a_slow_disk_is_waited_for(tmp_path):
    may_go_on = threading.Event()

    def slow(nbytes):
        assert nbytes == 8000
        assert may_go_on.wait(timeout=30)

    tensor = torch.arange(1000)
    move = Move(FileHost(tmp_path, before_copy=slow), tensor)
    threading.Timer(0.05, may_go_on.set).start()
    move.away([tensor])
    assert may_go_on.is_set()
    expected = tensor.clone()
    tensor.zero_()  # from here on the file alone has it
    move.fetch()
    assert torch.equal(move.back()[0], expected)


def test_a_full_disk_is_told_before_anything_is_copied(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostError, match=r"no room for 1\.0 MiB that is moved there: free some"):
        FileHost(tmp_path).reserve([1 << 20])


def test_a_small_disk_is_measured_with_what_it_has_room_for(tmp_path, monkeypatch):
    sizes, allocate = [], os.posix_fallocate

    def nearly_full(file, at, nbytes):
        if nbytes > 1 << 20 and sum(size > 1 << 20 for size in sizes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sizes.append(nbytes)
        allocate(file, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    assert measured_link(FileHost(tmp_path), CPU).out_bytes_per_s > 0


def test_a_forked_process_is_refused_and_not_waited_for(tmp_path):
    host = FileHost(tmp_path)
    there_and_back(host, torch.ones(8))
    child = os.fork()
    if child == 0:
        try:
            Move(host, torch.ones(8))
        except HostError as error:
            os._exit(0 if "was forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_copy_that_fails_is_one_sentence_where_it_is_waited_for(tmp_path):
    host = FileHost(tmp_path)
    tensor = torch.ones(100)
    move = Move(host, tensor)
    move.away([tensor])
    os.ftruncate(move._buffer.fileno(), 0)  # what was copied is lost
    move.fetch()
    with pytest.raises(HostError, match="a copy of a tensor failed half-way through a step"):
        move.back()


def test_a_copy_that_the_system_makes_in_pieces_is_whole(tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, memory, at: write(file, memory[:333], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:77]], at))
    tensor = torch.arange(1000)
    expected = tensor.clone()
    (back,) = there_and_back(FileHost(tmp_path), tensor)
    assert torch.equal(back, expected)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(HostError, match="there is no such folder"):
        FileHost(tmp_path / "missing")
    with pytest.raises(HostError, match="say in which folder with offload_dir"):
        host_for(CPU, None)


KILLED = """
import os, signal, sys, torch
from profiler.measuring.hosts import FileHost, Move
host = FileHost(sys.argv[1])
move = Move(host, torch.ones(1 << 20))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
move.away([])
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_process_that_ends_half_way_leaves_no_files(tmp_path, how):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), how], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert ended.returncode in (-signal.SIGKILL, -signal.SIGINT, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_measured_link_has_speeds_and_a_latency(tmp_path):
    link = measured_link(FileHost(tmp_path), CPU)
    assert "ops beside copies" not in {thread.name for thread in threading.enumerate()}
    assert link.out_bytes_per_s > 1e6
    assert link.in_bytes_per_s > 1e6
    assert link.latency_us >= 0


# -- CUDA, against a stand-in ---------------------------------------------------------------------------------------


class FakeCuda:
    """Streams and events that note in which order they are asked for what."""

    def __init__(self):
        self.log = []
        self.main = self.Stream(CPU, name="main")
        self.on = self.main

    def is_available(self):
        return False

    def current_stream(self, device=None):
        return self.on

    def stream(self, stream):
        api = self

        class Using:
            def __enter__(self):
                self.before, api.on = api.on, stream

            def __exit__(self, *_):
                api.on = self.before

        return Using()

    @property
    def Stream(self):  # noqa: N802 - torch's name
        api = self

        class Stream:
            def __init__(self, device, name=None):
                self.name = name or f"side {sum(e[0] == 'stream' for e in api.log)}"
                api.log.append(("stream", self.name))

            def wait_stream(self, other):
                api.log.append((self.name, "waits for stream", other.name))

            def wait_event(self, event):
                api.log.append((self.name, "waits for event", event.number))

        return Stream

    @property
    def Event(self):  # noqa: N802 - torch's name
        api = self

        class Event:
            def __init__(self):
                self.number = sum(e[1] == "records" for e in api.log if len(e) > 2)

            def record(self, stream):
                api.log.append((stream.name, "records", self.number))

        return Event


@pytest.fixture
def cuda():
    return FakeCuda()


def test_copies_run_on_streams_of_their_own_after_the_ops_and_before_what_waits(cuda):
    host = CudaHost(CPU, api=cuda)
    tensor = torch.randn(10)
    del cuda.log[:]
    (back,) = there_and_back(host, tensor)
    assert torch.equal(back, tensor)
    out, into = host._out.name, host._in.name
    assert cuda.log == [
        (out, "waits for stream", "main"), (out, "records", 0), ("main", "waits for event", 0),
        (into, "waits for stream", "main"), (into, "records", 1), ("main", "waits for event", 1),
    ]  # fmt: skip


def test_a_copy_can_be_held_up_on_its_own_stream(cuda):
    held_up = []
    host = CudaHost(CPU, api=cuda, before_copy=lambda nbytes: held_up.append((cuda.on.name, nbytes)))
    there_and_back(host, torch.randn(10))
    assert held_up == [(host._out.name, 40), (host._in.name, 40)]


def test_a_pinned_buffer_is_not_written_before_its_last_copy_back_was_read(cuda):
    host = CudaHost(CPU, api=cuda)
    there_and_back(host, torch.zeros(40, dtype=torch.uint8))
    gc.collect()
    (buffer,) = host._free[40]
    del cuda.log[:]
    move = Move(host, torch.zeros(40, dtype=torch.uint8))
    assert cuda.log[0] == (host._out.name, "waits for event", 1)
    assert move is not None
    assert host._free[40] == []
    assert buffer.read is not None


def test_what_lies_in_main_memory_is_copied_at_once(cuda):
    host, tensor = CudaHost(torch.device("cuda"), api=cuda), torch.randn(10)
    del cuda.log[:]
    (back,) = there_and_back(host, tensor)
    assert torch.equal(back, tensor)
    assert cuda.log == []


@pytest.mark.parametrize("half_way", [lambda move: None, lambda move: (move.away([]), move.fetch())], ids=["out", "in"])
def test_a_move_that_is_broken_off_is_done_before_its_memory_is_used_again(cuda, half_way):
    move = Move(CudaHost(CPU, api=cuda), torch.randn(10))
    half_way(move)
    _, _, number = [entry for entry in cuda.log if entry[1] == "records"][-1]
    del cuda.log[:]
    del move
    assert cuda.log == [("main", "waits for event", number)]
