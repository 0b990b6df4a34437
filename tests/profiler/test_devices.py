"""Devices: known ones by name, a user's own by a file, and every way in which that file can be wrong."""

import pytest
import torch

from planner.errors import PlannerError
from planner.host_link import HostLink
from profiler.estimating import calibration
from profiler.estimating.devices import (
    A100,
    BLOCK_BYTES,
    CONTEXT_BYTES,
    DEVICES,
    GIB,
    Device,
    DeviceError,
    Workspace,
    find_device,
)
from profiler.estimating.kinds import OpKind

GOOD = """\
name = "my card"
memory_gib = 24
bandwidth_gb_per_s = 936
float32_tflops = 35.6
"""


def written(tmp_path, text):
    path = tmp_path / "card.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# -- known ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A100-40", "a100-40", "A100_40", "a100 40GB", "NVIDIA A100-40"])
def test_a_device_is_found_however_its_name_is_written(name):
    assert find_device(name) is DEVICES["A100-40"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DeviceError) as raised:
        find_device("A100")
    assert all(name in str(raised.value) for name in ("'A100'", *DEVICES, "my_card.toml"))
    assert isinstance(raised.value, PlannerError)


def test_the_cpu_is_described_by_a_benchmark(monkeypatch):
    monkeypatch.setattr(calibration, "calibrated_cpu", lambda: A100)
    assert find_device("CPU") is A100


def test_every_device_cites_its_source_and_can_do_something():
    assert {"A100-40", "A100-80", "H100-80", "L4", "T4", "V100-16", "V100-32", "RTX3090", "RTX4090", "GH200-96"} == set(
        DEVICES
    )
    for name, known in DEVICES.items():
        assert name == known.name
        assert "NVIDIA" in known.source
        assert 0.8 * known.memory_bytes < known.usable_bytes < known.memory_bytes
        assert known.flops_for(torch.float16) > known.flops_for(torch.float32) > 0
        assert known.block_bytes == BLOCK_BYTES
        assert 0 < known.arithmetic_share < 1
        assert 0 < known.bandwidth_share < 1


def test_devices_stand_in_the_order_of_what_fits_on_them():
    sizes = [known.usable_bytes for known in DEVICES.values()]
    assert sizes == sorted(sizes)


def test_usable_memory_is_what_context_and_fragmentation_leave():
    card = Device(
        name="d",
        memory_bytes=100,
        flops_per_s=1,
        bytes_per_s=1,
        launch_us=0,
        reserved_bytes=20,
        fragmentation_share=0.1,
    )
    assert card.usable_bytes == 72


def test_the_fixed_roofline_allows_for_nothing():
    assert (A100.flops_per_s, A100.bytes_per_s, A100.launch_us) == (120e12, 1.3e12, 3.0)
    assert (A100.arithmetic_share, A100.bandwidth_share, A100.block_bytes, A100.workspaces) == (1.0, 1.0, 1, {})
    assert A100.flops_for(torch.float32) == A100.flops_for(torch.bfloat16)


# -- rates ------------------------------------------------------------------------------------------------------------


def test_float32_convolutions_use_tf32_and_matrix_products_do_not():
    a100 = DEVICES["A100-40"]
    assert a100.flops_for(torch.float32, OpKind.MATMUL) == 19.5e12
    assert a100.flops_for(torch.float32, OpKind.CONVOLUTION) == 156e12
    assert a100.flops_for(torch.float32, OpKind.CONVOLUTION_BACKWARD) == 156e12
    assert a100.flops_for(torch.bfloat16, OpKind.CONVOLUTION) == 312e12


@pytest.mark.parametrize("name", ["T4", "V100-16", "V100-32"])
def test_without_tensor_cores_for_it_bfloat16_runs_at_the_rate_of_float32(name):
    old = DEVICES[name]
    assert old.flops_for(torch.bfloat16) == old.flops_for(torch.float32)
    assert old.flops_for(torch.float32, OpKind.CONVOLUTION) == old.flops_for(torch.float32)
    assert "no bfloat16" in old.source


def test_a_kind_has_its_share_of_the_share():
    card = Device(
        name="d",
        memory_bytes=1,
        flops_per_s=100.0,
        bytes_per_s=1000.0,
        launch_us=0.0,
        arithmetic_share=0.5,
        bandwidth_share=0.25,
        share_by_kind={OpKind.MATMUL: 0.1},
    )
    assert card.reached_flops(torch.float32, OpKind.MATMUL) == pytest.approx(5.0)
    assert card.reached_flops(torch.float32, OpKind.CONVOLUTION) == pytest.approx(50.0)
    assert card.reached_bytes(OpKind.MATMUL) == pytest.approx(25.0)
    assert card.reached_bytes(OpKind.NORM) == pytest.approx(250.0)


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024), (10 * 2**20, 10 * 2**20)])
def test_cuda_rounds_tensors_to_blocks_of_512_bytes(nbytes, rounded):
    assert DEVICES["T4"].rounded(nbytes) == rounded


def test_a_workspace_is_a_number_of_bytes_and_a_share_of_what_an_op_reads_or_makes():
    assert Workspace(fixed_bytes=10, share=0.5).nbytes(101) == 10 + 51


# -- a user's own -----------------------------------------------------------------------------------------------------


def test_four_figures_make_a_device(tmp_path):
    path = written(tmp_path, GOOD)
    mine = find_device(path)
    assert (mine.name, mine.memory_bytes, mine.bytes_per_s, mine.flops_per_s) == ("my card", 24 * GIB, 936e9, 35.6e12)
    assert mine.flops_for(torch.bfloat16) == mine.flops_for(torch.float32)
    assert mine.source == f"the file {path}"
    known = DEVICES["RTX3090"]
    assert (mine.block_bytes, mine.launch_us, mine.workspaces) == (512, known.launch_us, known.workspaces)
    assert mine.usable_bytes == int(23.5 * GIB * 0.99)


def test_every_other_field_is_read(tmp_path):
    extra = """\
tf32_tflops = 40
float16_tflops = 71
bfloat16_tflops = 72.5
launch_us = 0
arithmetic_share = 1
bandwidth_share = 0.9
reserved_gib = 2
fragmentation_share = 0
block_bytes = 256
matmul_workspace_mib = 1
convolution_workspace_share = 0.5
source = "its box"
"""
    mine = find_device(written(tmp_path, GOOD + extra))
    assert mine.flops_for(torch.float32, OpKind.CONVOLUTION) == 40e12
    assert (mine.flops_for(torch.float16), mine.flops_for(torch.bfloat16)) == (71e12, 72.5e12)
    assert (mine.launch_us, mine.arithmetic_share, mine.bandwidth_share, mine.block_bytes) == (0, 1, 0.9, 256)
    assert mine.usable_bytes == 22 * GIB
    assert mine.workspaces[OpKind.MATMUL].nbytes(10**9) == 2**20
    assert mine.workspaces[OpKind.CONVOLUTION].nbytes(100) == 50
    assert mine.workspaces[OpKind.CONVOLUTION_BACKWARD].nbytes(100) == 50
    assert mine.source == "its box"


@pytest.mark.parametrize("field", ["name", "memory_gib", "bandwidth_gb_per_s", "float32_tflops"])
def test_a_missing_figure_is_named(tmp_path, field):
    text = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(field))
    path = written(tmp_path, text)
    with pytest.raises(DeviceError, match=rf"card\.toml: the field {field} is missing"):
        find_device(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("name = 3", "expected text"),
        ('name = " "', "expected text"),
        ("source = 3", "expected text"),
        ('memory_gib = "24"', "expected a number above 0"),
        ("memory_gib = 0", "expected a number above 0"),
        ("memory_gib = true", "expected a number above 0"),
        ("memory_gib = inf", "expected a number above 0"),
        ("bandwidth_gb_per_s = -1", "expected a number above 0"),
        ("bandwidth_gb_per_s = nan", "expected a number above 0"),
        ("float32_tflops = []", "expected a number above 0"),
        ("tf32_tflops = 0", "expected a number above 0"),
        ("float16_tflops = 0", "expected a number above 0"),
        ("bfloat16_tflops = 0", "expected a number above 0"),
        ("launch_us = -0.1", "expected a number of at least 0"),
        ("arithmetic_share = 60", "expected a share above 0, at most 1"),
        ("bandwidth_share = 0", "expected a share above 0, at most 1"),
        ("reserved_gib = -1", "expected a number of at least 0"),
        ("reserved_gib = 24", "expected less than memory_gib = 24"),
        ("fragmentation_share = 1", "expected a share from 0 to 0.9"),
        ("block_bytes = 0", "expected a whole number of at least 1"),
        ("block_bytes = 512.5", "expected a whole number of at least 1"),
        ("matmul_workspace_mib = -1", "expected a number of at least 0"),
        ("convolution_workspace_share = -1", "expected a number of at least 0"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_expected(tmp_path, line, expected):
    field = line.partition(" ")[0]
    kept = "".join(other for other in GOOD.splitlines(keepends=True) if not other.startswith(f"{field} "))
    path = written(tmp_path, kept + line + "\n")
    with pytest.raises(DeviceError) as raised:
        find_device(path)
    assert str(raised.value).startswith(f"{path}: {field} = ")
    assert expected in str(raised.value)


def test_an_unknown_field_lists_the_known_ones(tmp_path):
    with pytest.raises(DeviceError, match=r"unknown field memory = 24: there are name, source, memory_gib"):
        find_device(written(tmp_path, GOOD + "memory = 24\n"))


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path):
    with pytest.raises(DeviceError, match=r"card\.toml: not a TOML file"):
        find_device(written(tmp_path, "memory_gib: 24"))
    with pytest.raises(DeviceError, match=r"none\.toml: no such device file"):
        find_device(str(tmp_path / "none.toml"))


def test_what_the_driver_shows_to_programs_is_less_the_context(tmp_path):
    seen = find_device(written(tmp_path, GOOD + "seen_gib = 23.5\n"))
    assert seen.reserved_bytes == GIB // 2 + CONTEXT_BYTES


@pytest.mark.parametrize(
    ("lines", "said"),
    [("seen_gib = 24.5", "at most memory_gib"), ("seen_gib = 23\nreserved_gib = 1", "leave one out")],
)
def test_memory_that_is_seen_must_be_there_and_be_said_once(tmp_path, lines, said):
    with pytest.raises(DeviceError, match=said):
        find_device(written(tmp_path, GOOD + lines + "\n"))


def test_every_known_device_has_a_link_to_its_host_by_its_generation():
    links = {name: device.host_link for name, device in DEVICES.items()}
    assert all(links.values())
    speeds = {name: round(link.out_bytes_per_s / 1e9, 1) for name, link in links.items()}
    assert (speeds["T4"], speeds["A100-40"], speeds["H100-80"], speeds["GH200-96"]) == (12.6, 25.2, 50.4, 360.0)


def test_a_device_file_may_name_its_link(tmp_path):
    figures = 'name = "mine"\nmemory_gib = 24\nbandwidth_gb_per_s = 936\nfloat32_tflops = 35.6\n'
    path = tmp_path / "mine.toml"
    path.write_text(figures)
    assert find_device(str(path)).host_link is None
    path.write_text(figures + "host_link_gb_per_s = 10\nhost_link_share = 0.5\n")
    assert find_device(str(path)).host_link == HostLink.of(5.0)
    path.write_text(figures + "host_link_gb_per_s = 0\n")
    with pytest.raises(DeviceError, match="host_link_gb_per_s = 0: expected a number above 0"):
        find_device(str(path))
