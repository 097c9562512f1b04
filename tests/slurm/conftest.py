"""The cluster that all tests of a session share, and a run on it that nothing disturbed: `make test-slurm`."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.run_mpi import REPOSITORY
from tests.slurm.cluster import Cluster, missing
from tests.slurm.site import NUM_ITERATIONS, OPTIONS, TWO_NODES, Site, numbers


@pytest.fixture(scope="session")
def site():
    """Yields a cluster of two nodes."""
    if why := missing():
        pytest.exit(f"no Slurm can be started here: {why}", returncode=2)
    os.environ.pop("TRITON_INTERPRET", None)  # of the other tests; no user has it
    (REPOSITORY / ".cache").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=REPOSITORY / ".cache"))  # nodes have a /tmp of their own
    with Cluster() as cluster:
        yield Site(cluster, folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def undisturbed(site):
    """Returns the numbers of a run under srun on two nodes, and what listened on each of them meanwhile."""
    job = site.submit("train.sbatch", *OPTIONS, options=TWO_NODES)
    site.after(job, 1)
    listeners = {node: site.cluster.listeners(node) for node in site.cluster.names}
    site.ends_well(job)
    assert json.loads(site.log(job).splitlines()[-1])["iterations"] == NUM_ITERATIONS
    return numbers(site.metrics(f"job-{job}")), listeners
