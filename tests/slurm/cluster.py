"""A real Slurm of several nodes on one machine, from Debian's packages, for the tests of slurm/.

    apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2

Needs root. Each node is a network namespace with an address, a host name, /tmp and /dev/shm of its own, so ranks on two
nodes can't reach each other by loopback or shared memory, and a node is lost by killing whatever runs in it. The
controller and the commands that talk to it are in a namespace, too: nothing listens on the machine's own network.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.run_mpi import REPOSITORY

NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "ip", "nsenter", "unshare", "ss")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
NETWORK = "198.51.100"  # TEST-NET-2, which no real network has
INTERFACE = "net0"  # of every node
LOCK = Path("/run/rlhf-slurm.lock")  # the names of the namespaces are the machine's
START_S, STOP_S, POLL_S = 60.0, 10.0, 0.2

CONFIG = """
ClusterName=test
SlurmctldHost=controller({network}.1)
CommunicationParameters=NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
# more than a job script takes to notice a lost node, as with the usual 300
SlurmdTimeout=20
SlurmdDebug=debug3
KillWait=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""

# What a node is before its daemon starts: $1 host name, $2 hosts file, $3 folder of its own, then the daemon.
NODE = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mkdir -p "$3/tmp" "$3/cgroup"
mount --rbind /sys/fs/cgroup "$3/cgroup"
mount -t sysfs sysfs /sys  # shows the interfaces of this network; MPI looks for them there
mount --rbind "$3/cgroup" /sys/fs/cgroup
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$3/tmp" /tmp
shift 3
exec "$@"
"""


def missing() -> str:
    """Returns why no cluster can be made here; empty if one can."""
    hidden = [path for path in (REPOSITORY, Path(sys.prefix)) if path.resolve().is_relative_to("/tmp")]
    if hidden:
        return f"its nodes have a /tmp of their own and don't see {hidden[0]}: use a checkout outside /tmp"
    if os.geteuid() != 0:
        return "a cluster of network namespaces needs root"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {PACKAGES}"
    return ""


class Cluster:
    """`with Cluster() as cluster`: nodes n1, n2, ... of `cpus` declared CPUs each; everything is gone at the end."""

    def __init__(self, num_nodes: int = 2, cpus: int = 4):
        self.names = [f"n{index}" for index in range(1, num_nodes + 1)]
        self.cpus = cpus
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        self.lock = LOCK.open("w", encoding="utf-8")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError("another cluster of these tests is up on this machine: wait for its end") from None
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/run"))  # short: a socket's path is at most 107 long
        try:
            self._remove_nodes()  # of tests that were killed
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "controller" in self.daemons:
            self.command("scancel", "--state=PENDING", "--user=root", check=False)
        for name in reversed(self.daemons):
            self.daemons[name].terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._remove_nodes()
        shutil.rmtree(self.folder)
        self.lock.close()

    def _remove_nodes(self) -> None:
        for name in ("controller", *self.names):
            if Path(f"/run/netns/{_space(name)}").exists():
                self.kill_all(name)
                _ip("netns", "delete", _space(name))

    def _start(self) -> None:
        for name in ("controller", *self.names):
            _ip("netns", "add", _space(name))
            _ip("-n", _space(name), "link", "set", "lo", "up")
        inside = ("-n", _space("controller"))
        _ip(*inside, "link", "add", "switch", "type", "bridge")
        _ip(*inside, "address", "add", f"{NETWORK}.1/24", "dev", "switch")
        _ip(*inside, "link", "set", "switch", "up")
        hosts = ["127.0.0.1 localhost", f"{NETWORK}.1 controller"]
        for index, name in enumerate(self.names, start=11):
            _ip(*inside, "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", _space(name))
            _ip(*inside, "link", "set", name, "master", "switch", "up")
            _ip("-n", _space(name), "address", "add", f"{NETWORK}.{index}/24", "dev", INTERFACE)
            _ip("-n", _space(name), "link", "set", INTERFACE, "up")
            hosts.append(f"{NETWORK}.{index} {name}")
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n", encoding="utf-8")
        nodes = [
            f"NodeName={name} NodeAddr={NETWORK}.{index} CPUs={self.cpus} RealMemory=1000 State=UNKNOWN"
            for index, name in enumerate(self.names, start=11)
        ]
        config = CONFIG.format(network=NETWORK, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(config, encoding="utf-8")
        (self.folder / "plugstack.conf").touch()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.folder / file}" for name, file in (files | {"seed-file": "munge.seed"}).items()]
        self._spawn("munge", [*_inside("controller"), "munged", "--foreground", "--force", *options])
        wait_until(lambda: (self.folder / "munge.socket").exists(), START_S, "munged starts")
        self._daemon("controller", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for name in self.names:
            self.start(name)

        for name in self.names:
            self.wait_for_node(name, "idle")

    def start(self, node: str) -> None:
        """Starts a node's daemon, at first or after `crash`."""
        self._daemon(node, "slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def wait_for_node(self, node: str, state: str) -> None:
        """Waits until Slurm says that a node is in this state."""

        def is_so() -> bool:
            only = ("--noheader", "--format=%T", "--partition=main", f"--nodes={node}")
            found = self.command("sinfo", *only, check=False)
            return found.strip().rstrip("*") == state

        wait_until(is_so, START_S, f"{node} is {state}")

    def _daemon(self, name: str, *words: str) -> None:
        own = self.folder / f"own-{name}"
        own.mkdir(exist_ok=True)
        enter = [*_inside(name), "unshare", "--uts", "--ipc", "--mount", "bash", "-c", NODE, "bash", name]
        self._spawn(name, [*enter, str(self.folder / "hosts"), str(own), *words])

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open(
            "a", encoding="utf-8"
        ) as log:  # a Ctrl-C for the tests is not for the daemons
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def crash(self, node: str) -> None:
        """Stops the node at once, with all its processes."""
        self.daemons[node].kill()
        self.kill_all(node)
        self.daemons[node].wait()

    def kill_all(self, name: str) -> None:
        """Sends SIGKILL to every process in a namespace."""
        while pids := self.pids(name):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)

    def pids(self, node: str) -> list[int]:
        """Returns the processes of a node, but for zombies."""
        found = [int(word) for word in _ip("netns", "pids", _space(node)).split()]
        return [pid for pid in found if Path(f"/proc/{pid}/cmdline").exists() and command_of(pid)]

    def ranks(self, node: str) -> list[int]:
        """Returns the processes of the program on a node."""
        return [pid for pid in self.pids(node) if command_of(pid)[1:4] in (["-m", "rlhf_spmd", "train"],)]

    def pmi_lines(self, node: str) -> list[str]:
        """Returns what MPI on a node has published through Slurm."""
        log = (self.folder / f"slurmd-{node}.log").read_text(errors="replace", encoding="utf-8")
        return re.findall(r"got client request: (cmd=put .*)", log)

    def listeners(self, node: str) -> list[str]:
        """Lists `address process` of everything that listens on a node: addresses without ports, `*` for all."""
        text = _run([*_inside(node), "ss", "--no-header", "-lntp"])
        found = []
        for line in text.splitlines():
            fields = line.split(maxsplit=5)
            found.append(f"{fields[3].rpartition(':')[0]} {fields[5] if len(fields) > 5 else ''}")
        return found

    def command(self, *words: str, check: bool = True, folder: Path | None = None, **environment: str) -> str:
        """Runs a Slurm command and returns what it prints."""
        everything = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **environment}
        return _run([*_inside("controller"), *words], check, everything, folder)

    def job(self, number: int | str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`."""
        text = self.command("scontrol", "show", "job", "-o", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for(self, number: int, *states: str, limit_s: float) -> dict[str, str]:
        """Waits until the job is in one of these states, and returns its fields."""
        wait_until(lambda: self.job(number)["JobState"] in states, limit_s, f"job {number} is {' or '.join(states)}")
        return self.job(number)


def command_of(pid: int) -> list[str]:
    """Returns the words that a process was started with; none if it is a zombie, or gone."""
    try:
        return [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def wait_until(true: Callable[[], object], limit_s: float, what: str) -> None:
    """Asks until the answer is true. Raises TimeoutError."""
    end_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"after {limit_s:g} s it is not so that {what}")
        time.sleep(POLL_S)


def _space(name: str) -> str:
    return f"rlhf-{name}"


def _inside(name: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{_space(name)}"]


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(command: Sequence[str], check: bool = True, environment=None, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=folder, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
