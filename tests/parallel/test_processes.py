"""Which process of a job this is: from the command line, or from the launcher's variables."""

import jax
import pytest

from jaxtrain.cluster.processes import ProcessRank, find_rank, first_host
from jaxtrain.parallel import MeshConfig, make_mesh
from jaxtrain.parallel.mesh import process_batch_shard
from jaxtrain.settings import UserError

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_JOB_ID": "4100",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((), {}, None),
        ((), {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # in a batch script, before srun
        ((), SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ((), SLURM, ProcessRank(3, 4, "gpu07:61444")),
        (("a:1",), SLURM, ProcessRank(3, 4, "a:1")),
        (
            (),
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            ProcessRank(3, 4, "gpu07:61444", (1,)),
        ),
        (("a:1",), MPI, ProcessRank(5, 8, "a:1", (1,))),
        (("a:1",), MPI | {"CUDA_VISIBLE_DEVICES": "2"}, ProcessRank(5, 8, "a:1")),
        (("a:1",), MPI | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ProcessRank(5, 8, "a:1", (1,))),
        (("a:1", 2, 0), {}, ProcessRank(0, 2, "a:1")),
        (("a:1", 2, 0), MPI, ProcessRank(0, 2, "a:1", (1,))),
    ],
)
def test_the_place_of_a_process(flags, environment, expected):
    assert find_rank(*flags, environment=environment) == expected


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("a:1",), {}, "--processes and --process missing"),
        ((None, 2, 1), {}, "--coordinator missing"),
        ((), MPI, "--coordinator missing"),
        (("a:1", 2, 2), {}, "--process 2: must be 0 to 1, for --processes 2"),
        (("a:1", 2, -1), {}, "--process -1: must be"),
    ],
)
def test_what_is_left_open_is_named(flags, environment, message):
    with pytest.raises(UserError, match=message):
        find_rank(*flags, environment=environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[003-12,20],m1", "n003"), ("n[7,9]", "n7"), ("a-1,a-2", "a-1")],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("sizes", "each", "share"),
    [
        ({"data": 8}, 2, (1, 4)),
        ({"data": 2, "fsdp": 4}, 4, (1, 2)),
        ({"data": 4, "tensor": 2}, 2, (1, 4)),
        ({"data": 2, "tensor": 4}, 2, (0, 2)),  # two processes hold the same rows
        ({"tensor": 8}, 2, (0, 1)),
        ({"pipeline": 2, "data": 4}, 4, (0, 1)),  # a stage of all rows each
        ({"pipeline": 2, "data": 2, "fsdp": 2}, 2, (1, 2)),
    ],
)
def test_the_rows_of_a_process(monkeypatch, sizes, each, share):
    """As seen by process 1, of processes that have `each` devices."""
    mesh = make_mesh(MeshConfig.model_validate({"data": 1} | sizes))
    owner = {d: i // each for i, d in enumerate(jax.devices())}
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr("jaxtrain.parallel.mesh.process_of", lambda d: owner[d])
    assert process_batch_shard(mesh) == share


def test_rows_that_no_process_holds_together(monkeypatch):
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr("jaxtrain.parallel.mesh.process_of", lambda d: min(d.id // 3, 2))
    with pytest.raises(UserError, match=r"process \d would hold the batch shards .* of 2"):
        process_batch_shard(mesh)
