"""Which device each rank gets, what is refused rather than run on the CPU, and who shares a device's memory."""

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.generation import kv_cache
from rlhf_spmd.runtime.world import devices
from rlhf_spmd.runtime.world.devices import RankDevice, VisibleDevice, check_program, choose_devices
from rlhf_spmd.runtime.world.groups import HEARTBEAT, make_groups
from tests.programs import make_workload

HOSTS = ("one", "one", "one", "two", "two", "two")
NODES = (0, 0, 0, 1, 1, 1)


def seen(*rows: Sequence[str]) -> list[list[VisibleDevice]]:
    """Returns what ranks see, by the devices' identities."""
    return [[VisibleDevice(identity, "NVIDIA H100 80GB HBM3", 85 * 10**9) for identity in row] for row in rows]


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_users_options_of_the_allocator_count(name):
    """torch reads only one of the names, and the documented one last."""
    environ = {name: "max_split_size_mb:512"} if name else {}
    devices.set_defaults(environ)
    found = {key: value for key, value in environ.items() if key.endswith("ALLOC_CONF")}
    assert found == ({name: "max_split_size_mb:512"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_nccl_does_not_register_what_graphs_read():
    environ: dict[str, str] = {}
    devices.set_defaults(environ)
    assert environ["NCCL_GRAPH_REGISTER"] == "0"
    environ["NCCL_GRAPH_REGISTER"] = "1"
    devices.set_defaults(environ)
    assert environ["NCCL_GRAPH_REGISTER"] == "1"


@pytest.mark.parametrize(
    ("kind", "timeout_s", "given", "expected"),
    [
        ("cuda", 3000.5, None, "3001"),
        ("cuda", 100.0, None, "480"),
        ("cuda", 3000.0, "60", "60"),
        ("cpu", 3000.0, None, None),
    ],
)
def test_torch_waits_as_long_for_a_rank_as_its_groups(kind, timeout_s, given, expected, monkeypatch):
    """Not 8 minutes, after which it would end a rank that may wait for ten deadlines."""
    found = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **_: found.append(os.environ.get(HEARTBEAT)))
    monkeypatch.setenv(HEARTBEAT, given or "")  # restored afterwards
    if given is None:
        monkeypatch.delenv(HEARTBEAT)
    device = RankDevice(kind, 0 if kind == "cuda" else None, 1, 1)
    make_groups({}, store=None, rank=0, size=1, device=device, timeout_s=timeout_s)
    assert found == [expected]


def test_torch_is_asked_and_nothing_runs_on_the_cpu_because_it_sees_none(monkeypatch):
    """NVIDIA's or AMD's: torch's names for both are the same."""
    about = SimpleNamespace(uuid="GPU-aa1", name="AMD Instinct MI300X", total_memory=206 * 10**9)
    monkeypatch.setattr(devices, "hints", lambda environ: ["SLURM_JOB_GPUS=0"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    for num in (1, 0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num=num: num)
        found = devices.find_devices("auto", "node7", torch.get_num_threads())
        rows, unseen = [[VisibleDevice(**device) for device in found["seen"]]], found["unseen"]
        if num:
            assert unseen == "" and rows == [[VisibleDevice("node7 GPU-aa1", "AMD Instinct MI300X", 206 * 10**9)]]
            assert choose_devices("auto", rows, unseen, (0,), ("node7",))[0].num_bytes == 206 * 10**9
            continue
        for wanted in ("auto", "cuda"):
            with pytest.raises(
                UserError, match="node7 has SLURM_JOB_GPUS=0, but torch sees no device on node7.*device=cpu"
            ):
                choose_devices(wanted, rows, unseen, (0,), ("node7",))
        assert choose_devices("cpu", rows, unseen, (0,), ("node7",))[0].kind == "cpu"
    assert devices.find_devices("cpu", "node7", 1) == {"seen": [], "unseen": ""}


def test_each_rank_of_a_node_gets_a_device_of_its_own():
    assert devices.assign([["a", "b"], ["a", "b"]]) == [0, 1]
    assert devices.assign([["a"], ["b"]]) == [0, 0]  # the launcher bound them
    assert devices.assign([["b", "a"], ["a", "b"], ["c"]]) == [0, 0, 0]
    assert devices.assign([["a"], ["a"]]) is None
    assert devices.assign([[]]) is None
    assert devices.assign([["a", "b"], ["a"]]) == [1, 0]  # the first leaves its first choice to the second
    assert devices.assign([["a", "b"], ["b", "c"], ["a"], ["c"]]) is None


def test_a_device_for_each_rank_or_the_cpu_of_all():
    none = [()] * 6
    for wanted in ("auto", "cpu"):
        assert choose_devices(wanted, none, "", NODES, HOSTS) == [RankDevice("cpu", None, 3, 2)] * 6
    rows = seen(*["abc"] * 3, "d", "e", "f")  # on the second node the launcher bound them
    own = [RankDevice("cuda", index, 1, 6, "NVIDIA H100 80GB HBM3", 85 * 10**9) for index in (0, 1, 2, 0, 0, 0)]
    assert choose_devices("auto", rows, "", NODES, HOSTS) == choose_devices("cuda", rows, "", NODES, HOSTS) == own
    assert choose_devices("cpu", rows, "", NODES, HOSTS) == [RankDevice("cpu", None, 3, 2)] * 6


@pytest.mark.parametrize(
    ("wanted", "rows", "words"),
    [
        ("auto", [("a",)] * 3 + [("b", "c", "d")] * 3, "one has 3 ranks and 1 devices for them; start one"),
        ("cuda", [("a", "b")] * 3 + [("c", "d", "e")] * 3, "one has 3 ranks and 2 devices for them"),
        ("auto", [("a", "b", "c")] * 3 + [()] * 3, "device=auto, but a rank on two sees no device"),
        ("shared", [("a",), (), ("a",), ("b",), ("b",), ("b",)], "device=shared, but a rank on one sees no device"),
    ],
)
def test_nothing_runs_on_the_cpu_unasked(wanted, rows, words):
    with pytest.raises(UserError) as caught:
        choose_devices(wanted, seen(*rows), "", NODES, HOSTS)
    assert words in str(caught.value) and "device=cpu" in str(caught.value)


def test_ranks_share_devices_evenly():
    found = choose_devices("shared", seen(*["ab"] * 3, *["c"] * 3), "", NODES, HOSTS)
    assert [(one.index, one.num_ranks) for one in found] == [(0, 2), (1, 1), (0, 2), (0, 3), (0, 3), (0, 3)]
    assert {(one.kind, one.num_devices) for one in found} == {("shared", 3)}
    bound = seen("a", "b", "ab", "c", "d", "e")  # two of three cannot be told apart by their numbers
    assert [one.num_ranks for one in choose_devices("shared", bound, "", NODES, HOSTS)] == [2, 1, 2, 1, 1, 1]


def test_the_cache_gets_what_is_left_to_the_ranks_on_the_same_device(monkeypatch):
    """Also where the launcher lets each of eight ranks see a device of its own only. What torch holds in reserve does
    not count: no piece of it may be as large as a cache."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70_000, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    bound = choose_devices("auto", seen(*([f"device {rank}"] for rank in range(8))), "", (0,) * 8, ("one",) * 8)
    device = torch.device("cuda", bound[3].index)
    assert kv_cache.free_bytes(device, bound[3].num_ranks) == 70_000
    shared = choose_devices("shared", seen(*[["device"]] * 4), "", (0,) * 4, ("one",) * 4)
    assert kv_cache.free_bytes(device, shared[3].num_ranks) == 70_000 / 4


def test_deepspeed_needs_a_device_of_its_own():
    workload, cluster = make_workload(), Cluster.parse("1x4")
    shared = RankDevice("shared", 0, 4, 1)
    for zero in (0, 1, 2, 3):
        program = load_strategy("flattening").compile(workload, cluster, {"zero": zero})
        check_program(RankDevice("cuda", 0, 1, 4), program)
        check_program(RankDevice("cpu", None, 4, 1), program)
        if zero < 3:
            check_program(shared, program)
            continue
        with pytest.raises(UserError, match=f"actor_train has ZeRO {zero}, which uses DeepSpeed"):
            check_program(shared, program)


def test_a_mixture_needs_cpus_whatever_their_type_is_called():
    shape = ModelShape(2, 8, 16, 8, 4, 4, 32, num_experts=6, experts_per_token=2, expert_size=4)
    cluster = Cluster((Node(2, "cpu"), Node(2, "slow")))
    program = load_strategy("heterogeneous").compile(make_workload(shape=shape), cluster, {})
    check_program(RankDevice("cpu", None, 4, 1), program)
    with pytest.raises(UserError, match="run on CPUs alone"):
        check_program(RankDevice("cuda", 0, 1, 4), program)


@pytest.mark.parametrize(
    ("compiler", "environ", "header", "words"),
    [
        ("gcc", {}, True, ""),
        ("/opt/cc", {"CC": "/opt/cc"}, True, ""),
        (None, {}, True, "compiles with clang or gcc and "),
        ("gcc", {"CC": "icx"}, True, "compiles with icx and "),
        ("gcc", {}, False, "(gcc, python3-dev), or name a compiler in CC"),
    ],
)
def test_a_gpu_needs_what_triton_compiles_launchers_with(compiler, environ, header, words, tmp_path, monkeypatch):
    """Slim containers lack both; without a GPU neither is asked for."""
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(devices.shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda *_: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    lack = devices.lack_for_kernels(environ)
    assert words in lack and bool(lack) == bool(words)
    monkeypatch.setattr(devices, "lack_for_kernels", lambda environ: "whose kernels need a thing: install it")
    assert devices.select_device(RankDevice("cpu", None, 1, 1)) is None
    with pytest.raises(UserError, match="computes on H100, whose kernels need a thing: install it, or choose device=c"):
        devices.select_device(RankDevice("cuda", 0, 1, 1, "H100", 85 * 10**9))


def test_sums_of_products_are_float32(monkeypatch):
    """Those of bfloat16 numbers, too; torch's default lets products of few rows differ from those of many."""
    products = torch.backends.cuda.matmul
    monkeypatch.setattr(devices, "lack_for_kernels", lambda environ: "")
    monkeypatch.setattr(devices, "keep_kernels_on_node", lambda environ: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    before = products.allow_bf16_reduced_precision_reduction
    assert before is True
    try:
        devices.select_device(RankDevice("cuda", 0, 1, 1, "H100", 85 * 10**9))
        assert products.allow_bf16_reduced_precision_reduction is False
    finally:
        products.allow_bf16_reduced_precision_reduction = before


def test_compiled_kernels_stay_on_the_node(tmp_path, monkeypatch):
    """In a folder that nobody else can write to: what is there is executed."""
    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    for given in ({"TRITON_CACHE_DIR": "mine"}, {"TRITON_HOME": "mine"}):
        devices.keep_kernels_on_node(environ := dict(given))
        assert environ == given
    folder = tmp_path / f"rlhf_spmd_triton_{os.getuid()}"
    for _ in range(2):  # by each rank
        devices.keep_kernels_on_node(environ := {})
        assert environ == {"TRITON_CACHE_DIR": str(folder)} and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    devices.keep_kernels_on_node(environ := {})
    assert environ == {}
    folder.rmdir()
    folder.symlink_to(tmp_path)
    devices.keep_kernels_on_node(environ)
    assert environ == {}


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], []),
        ({}, ["/dev/nvidia0"], ["/dev/nvidia0"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["/dev/nvidia0"], ["CUDA_VISIBLE_DEVICES=0,1", "/dev/nvidia0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["/dev/nvidia0"], []),
        ({"ROCR_VISIBLE_DEVICES": "-1", "SLURM_JOB_GPUS": "3"}, ["/dev/kfd"], []),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, [], ["CUDA_VISIBLE_DEVICES=0"]),
        ({"GPU_DEVICE_ORDINAL": ""}, ["/dev/nvidia3"], ["/dev/nvidia3"]),
        ({"ROCR_VISIBLE_DEVICES": "2"}, [], ["ROCR_VISIBLE_DEVICES=2"]),
        ({"SLURM_JOB_GPUS": "0,1"}, [], ["SLURM_JOB_GPUS=0,1"]),
        ({"PBS_NGPUS": "0"}, [], []),
    ],
)
def test_what_hints_at_devices(environ, files, expected, monkeypatch):
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [path for path in files if fnmatch(path, pattern)])
    assert devices.hints(environ) == expected


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("2,1", 2), (" 3 , 1 ,1", 3), ("4096", 4096), ("", None), (" \t", None)]
)
def test_threads_are_the_first_number(text, threads):
    assert devices.threads_wanted({"OMP_NUM_THREADS": text}) == threads
    assert devices.threads_wanted({}) is None


@pytest.mark.parametrize("text", ["0", "abc", ",2", "\uff12", "4097", "9" * 99])
def test_other_threads_are_refused_by_name(text):
    with pytest.raises(UserError, match="^OMP_NUM_THREADS='.*': give the threads of each rank, from 1 to 4096"):
        devices.threads_wanted({"OMP_NUM_THREADS": text})
