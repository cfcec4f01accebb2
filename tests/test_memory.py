"""The dry run: memory, exchanges and the first mesh that fits, without an accelerator."""

import re

import jax
import jax.numpy as jnp
import pytest
from tiny import FEW_PARTS, assignments, byte_model, random_run

from benchmarks import memory
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.estimate import dry_run as preflight
from jaxtrain.estimate.dry_run_report import often, report
from jaxtrain.estimate.liveness import peak_bytes
from jaxtrain.estimate.reference import reference_bytes
from jaxtrain.estimate.workload import idle, kinds_of, load_workload
from jaxtrain.main import main
from jaxtrain.parallel.mesh import AXES
from jaxtrain.settings import UserError
from jaxtrain.train.reference_model import load_frozen

pytestmark = pytest.mark.slow

MODEL = [
    "model.depth=2", "model.width=64", "model.head_dim=16", "data.tokenizer.vocab_size=384",
    "train.sequence_length=64", "train.batch_size=16", "train.device_batch_size=1",
    "train.precision=bfloat16", "optim.name=adamw", "optim.schedule.name=constant",
]  # fmt: skip
PLAIN = [*MODEL, *assignments(**FEW_PARTS)]  # which compiles in half of the time
ONE_LAYER = [*PLAIN, "model.depth=1"]


def hlo(f, *shapes):
    return jax.jit(f).lower(*shapes).compile(compiler_options=preflight.OPTIONS).as_text()


def test_conversions_and_recomputed_values_take_no_memory():
    """Between two matmuls a pass reads one 16-bit value and writes another."""
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    one = peak_bytes(hlo(lambda x: ((x @ x).astype(jnp.float32) * 2).astype(x.dtype) @ x, x))
    assert one == 2 * 2 * 256 * 256
    chain = lambda x: jnp.sin(x @ x) @ (x @ x)
    assert peak_bytes(hlo(chain, x)) <= 3 * 2 * 256 * 256


def test_the_inside_of_a_loop_counts_once():
    def loop(x, n):
        return jax.lax.fori_loop(0, n, lambda i, y: (y @ x) @ x, x)

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    sizes = [peak_bytes(hlo(lambda x, n=n: loop(x, n), x)) for n in (3, 30)]
    assert sizes[0] == sizes[1] >= 256 * 256 * 4


def test_a_dry_run_has_the_microbatches_of_the_run():
    """A benchmark's step takes one, and its gradients are not summed in float32."""
    small = ["model.depth=2", "mesh.data=8", "train.sequence_length=64"]
    small += ["train.device_batch_size=2", "train.precision=bfloat16"]
    w = preflight.plain_workload("gpt_d24", small, jax.devices("cpu"), "xla")
    plain = load_workload("gpt_d24", small)
    assert w.config.train.batch_size > plain.config.train.batch_size == 8 * 2
    assert preflight.exact_bytes(w)["gradients"] > 1.9 * preflight.exact_bytes(plain)["gradients"]


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record():
    mesh = ["mesh.data=2", "mesh.fsdp=4"]
    return preflight.preflight("quickstart", [*MODEL, *mesh], 8, "H200")


def test_bytes_by_kind(record):
    m, parameters = record["metrics"], record["workload"]["parameters"]
    assert m["parameters_bytes"] == pytest.approx(parameters * 4 / 4, rel=0.02)
    assert m["states_bytes"] == pytest.approx(2 * m["parameters_bytes"], rel=0.02)
    assert m["copy_bytes"] == pytest.approx(m["parameters_bytes"] / 2, rel=0.02)
    assert m["gradients_bytes"] == pytest.approx(m["parameters_bytes"], rel=0.02)  # summed: float32
    assert m["total_bytes"] > m["parameters_bytes"] + m["states_bytes"]
    axes = {c["axes"] for c in record["collectives"]}
    assert any("fsdp" in a for a in axes) and any("data" in a for a in axes)


def test_a_pipeline_is_compiled_too():
    """In bfloat16, whose sums over stages end the process in a pass of the CPU's compiler."""
    mesh = ["mesh.data=1", "mesh.pipeline=2", "mesh.pipeline_repeats=2", "model.depth=4"]
    w = load_workload("quickstart", [*PLAIN, *mesh], jax.devices()[:2])
    sent = preflight.facts_of(w).sent
    assert w.config.mesh.pipeline_repeats == 2
    assert {("collective-permute", ("pipeline",)), ("all-reduce", ("pipeline",))} <= {
        (c.kind, c.axes) for c in sent
    }


def test_gradients_of_a_pipelines_rows_meet_once():
    """Not once a tick; stages of three layers and of two, each compiled by itself."""
    mesh = ["mesh.data=2", "mesh.pipeline=2", "model.depth=5", "model.window_pattern=SSL"]
    w = load_workload("quickstart", [*PLAIN, *mesh], jax.devices()[:4])
    assert [len(kind) for kind in kinds_of(w)] == [3, 2]
    assert idle(w) == pytest.approx(1 / 9)
    assert idle(w, 5) == pytest.approx(1 - 8 / 9 * 5 / 6)
    times = {(c.kind, c.axes): c.times for c in preflight.facts_of(w).sent}
    assert times["collective-permute", ("pipeline",)] == 3 * 9
    assert times["all-reduce", ("data",)] < 9


def test_replicas_that_meet_each_fourth_step():
    """Their own weights and states count, and what is sent where they meet, a quarter of it."""
    mesh = ["mesh.data=2", "mesh.fsdp=2", "train.batch_size=4", "train.precision=float32"]
    local = ["train.local_sgd.name=diloco", "train.local_sgd.every=4"]
    record = preflight.preflight("quickstart", [*ONE_LAYER, *mesh, *local], 4, "H200")
    m = record["metrics"]
    assert m["states_bytes"] == pytest.approx(4 * m["parameters_bytes"], rel=0.02)
    sent = [c for c in record["collectives"] if c["axes"] == ("data",)]
    # A ring of two sends as much as it sums up: a device's half of the float32 weights.
    assert sum(c["bytes"] for c in sent) == pytest.approx(m["parameters_bytes"] / 4, rel=0.02)
    assert often(0.25) == "every 4 steps" and often(1e3) == "1,000 times"


def test_no_mesh_to_try_is_one_line(capsys):
    learned = ["model.position_embedding=learned", "model.context_length=8"]
    assert main(["--config", "quickstart", "--fit", "4", *learned]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: no mesh of 4 x H200 to try: model.context_length: positions are "
    )


@pytest.mark.default_tier
def test_a_report_of_two_devices():
    record = preflight.preflight("quickstart", [*ONE_LAYER, "mesh.fsdp=2"], 2, "H200")
    m = record["metrics"]
    parameters = record["workload"]["parameters"]
    assert m["parameters_bytes"] == pytest.approx(parameters * 4 / 2, rel=0.02)
    assert m["total_bytes"] > m["parameters_bytes"] + m["states_bytes"]
    assert any("fsdp" in c["axes"] for c in record["collectives"])
    text = report(record)
    assert "on 2 x H200: fsdp 2, ZeRO-3" in text and "activations and scratch" in text
    assert "if all exchanges are hidden" in text and " 0 ms if" not in text


@pytest.mark.default_tier
def test_a_report_of_one_device_names_no_exchange(capsys):
    assert main(["--config", "quickstart", "--dry-run", "--device", "H200", "model.depth=1"]) == 0
    _, device, *_, step = capsys.readouterr().out.splitlines()
    assert device == "on 1 x H200"
    assert re.fullmatch(r"a step takes 0\.0*[1-9]\d? ms \(estimate\)", step)


def test_dry_run_prints_and_the_first_mesh_that_fits(record, capsys):
    """So little memory that one device is not enough for whole states."""
    text = report(record)
    assert "on 8 x H200: data 2 x fsdp 4, ZeRO-3" in text and "activations and scratch" in text
    seen = []

    def pretend(name, overrides, devices, kind, memory):
        seen.append(overrides)
        total = max(100 - 10 * len(seen), 10)
        metrics = record["metrics"] | {"total_bytes": total, "fits": total < memory}
        return record | {"metrics": metrics}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "preflight", pretend)
        assert main(["--config", "quickstart", "--fit", "8", "--memory", str(75 / 2**30)]) == 0
        assert [line[-1] for line in seen] == ["mesh.fsdp=1", "mesh.zero=1", "mesh.zero=2"]
        seen.clear()
        assert main(["--config", "quickstart", "--fit", "8", "--memory", str(5 / 2**30)]) == 2
    assert "no mesh of 8 x H200 (5 B) holds quickstart" in capsys.readouterr().err


def test_meshes_to_try_begin_with_those_that_cost_least():
    block, whole = "model.remat=block", ["mesh.data=auto", "mesh.fsdp=1"]
    sharded, both = ["mesh.data=1", "mesh.fsdp=auto"], ["mesh.data=auto", "mesh.fsdp=2"]
    stages = [[*sharded, f"mesh.zero={stage}"] for stage in (1, 2, 3)]
    plain = [whole, *stages, both, [*sharded, block], [*both, block]]
    near = ("context", "tensor")
    assert preflight.candidate_meshes(4, 8, experts=True) == [
        *plain,
        [*whole, "mesh.expert=2", block], [*sharded, "mesh.expert=2", block],
        [*sharded, "mesh.expert=4", block],
        *([*sharded, f"mesh.{a}={n}", block] for a in (*near, "pipeline") for n in (2, 4)),
    ]  # fmt: skip
    assert len(preflight.candidate_meshes(1, 8, experts=True)) == 2
    for devices, few, divisors in ((12, (2, 3, 4), (2, 3, 4, 6)), (7, (), (7,))):
        tried = preflight.candidate_meshes(devices, 4, experts=False)
        tried = [line[2] for line in tried if block in line[3:]]
        found = [f"mesh.{a}={n}" for a in near for n in few]
        assert tried == found + [f"mesh.pipeline={n}" for n in divisors]


def test_of_several_hosts_data_goes_over_the_hosts_and_fsdp_over_a_hosts_devices():
    tried = preflight.candidate_meshes(32, 8, experts=False)
    assert tried[2] == ["mesh.data=auto", "mesh.fsdp=8"] and tried[1][-1] == "mesh.zero=1"
    assert [preflight.shares(n, 8) for n in (1, 2, 3, 6, 12, 16)] == [
        [],
        [],
        [],
        [3, 2],
        [6, 4],
        [8],
    ]
    for devices in (6, 8, 24, 64):
        assert len(preflight.candidate_meshes(devices, 8, experts=True)) <= 32


def test_hosts_have_equally_many_devices():
    """Six devices of hosts of four: two hosts with three each."""
    for axes, across in (({"data": 3, "fsdp": 2}, {"fsdp": 2}), ({"data": 6}, {"data": 2})):
        sizes = dict.fromkeys(AXES, 1) | axes
        mesh = jax.make_mesh(tuple(sizes.values()), AXES, devices=jax.devices()[:6])
        assert preflight.hosts_of(mesh, 4) == dict.fromkeys(AXES, 1) | across


def test_what_cannot_be_tried_is_counted_and_its_reasons_named(record, capsys):
    argv = ["--config", "moe_tiny", "--dry-run", "--device", "T4", "--fit"]
    assert main([*argv, "7"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no mesh of 7 x T4 to try: ")
    for reason in (
        "train.batch_size 8 does not divide over 7 devices (mesh data x fsdp x expert); use 7",
        "mesh.fsdp=7 does not divide model.width 128; these would: 1, 2, 4,",
        "mesh.pipeline=7 is more than model.depth 4, and each needs a layer",
    ):
        assert reason in line
    assert "context" not in line

    def pretend(name, overrides, devices, kind, memory):
        if "mesh.fsdp=2" not in overrides:
            raise UserError("mesh.fsdp=6 does not divide model.width 128")
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "preflight", pretend)
        assert main([*argv, "6"]) == 0
    fits, left = capsys.readouterr().err.splitlines()
    assert fits.startswith("  mesh.data=auto mesh.fsdp=2: ")
    assert left == (
        "  left out: 3 that this configuration does not take, as mesh.fsdp=6 does not divide "
        "model.width 128"
    )


# Two rows for four devices; three heads, which no axis of these splits.
TWO_ROWS = ["model.width=48", "model.head_dim=16", "train.batch_size=2"]
# fsdp splits the width in two at most, which leaves a device too much; there is one head.
EXPERTS = ["model.width=62", "model.head_dim=62", "train.batch_size=4", "model.moe.experts=8"]
EXPERTS += ["model.moe.hidden=64", "model.depth=1", "train.sequence_length=64"]


@pytest.mark.parametrize(
    ("changes", "memory", "mesh"),
    [
        ([*TWO_ROWS, "model.depth=1", "train.sequence_length=64"], None, "fsdp 2 x context 2"),
        ([*TWO_ROWS, "model.depth=2", "train.sequence_length=62"], None, "pipeline 2 x fsdp 2"),
        (EXPERTS, 1.95 * 2**20, "fsdp 2 x expert 2"),
    ],
    ids=["context", "pipeline", "expert"],
)
def test_the_only_mesh_that_fits(changes, memory, mesh, monkeypatch, capsys):
    """With experts, of those that divide parameters over as many devices as they can."""
    tight = lambda x: "mesh.data=1" in x or {"mesh.fsdp=2", "model.remat=block"} <= set(x)
    found = preflight.candidate_meshes
    if memory:
        few = lambda *given: [one for one in found(*given) if tight(one)]
        monkeypatch.setattr(preflight, "candidate_meshes", few)
    given = [line for line in MODEL if line.split("=")[0] not in {c.split("=")[0] for c in changes}]
    given += [*changes, *assignments(**FEW_PARTS)]
    limit = ["--memory", str(memory / 2**30)] if memory else []
    assert main(["--config", "quickstart", "--fit", "4", *limit, *given]) == 0
    out, tried = capsys.readouterr()
    assert f"on 4 x H200: {mesh}, ZeRO-3" in out and "fits (90%" in out
    assert tried.splitlines()[-1].startswith("  left out: ")
    assert ("expert=" in tried.replace("fsdp x expert", "")) == ("expert" in mesh)
    assert "over  (" not in out  # not what devices send to themselves


def test_documents_of_a_spread_text_are_for_xlas_attention():
    """Which alone has them; and so the dry run of a whole step goes through."""
    documents = [*MODEL, "model.document_mask=true"]
    devices = jax.devices()[:2]
    named = lambda mesh: preflight.plain_workload(
        "quickstart", [*documents, mesh], devices, "cudnn"
    )
    assert named("mesh.context=2").config.model.attention == "xla"
    assert named("mesh.data=2").config.model.attention == "cudnn"


def test_what_is_frozen_counts_in_the_dtype_that_it_is_kept_in():
    tuned = ["model.depth=1", "model.width=64", "model.head_dim=16", "finetune.name=lora"]
    tuned += ["finetune.rank=2", "train.precision=float16", "train.batch_size=1"]
    tuned += ["train.sequence_length=64", "optim.name=adamw", "optim.schedule.name=constant"]
    tuned += assignments(**FEW_PARTS)
    whole, packed = (
        preflight.preflight("quickstart", [*tuned, f"finetune.base_quantization={base}"], 1, "T4")
        for base in ("null", "nf4")
    )
    lora = 2 * (4 * (64 + 64) + 2 * (64 + 256))  # rank x (in + out)
    assert whole["workload"]["trained"] == packed["workload"]["trained"] == lora
    assert whole["metrics"]["parameters_bytes"] == 4 * lora
    matrices = 4 * 64 * 64 + 2 * 64 * 256
    rest = whole["metrics"]["frozen_bytes"] - 2 * matrices
    few = packed["metrics"]["frozen_bytes"] - rest
    assert 2 * (whole["workload"]["parameters"] - matrices) <= rest
    assert few == pytest.approx(4.13 / 8 * matrices, rel=0.02)
    assert "frozen weights" in report(whole) and whole["variant"] == "fp16"


TEACHER = ["model.depth=3", "model.width=96", "model.head_dim=16", "data.tokenizer.name=bytes"]


@pytest.mark.default_tier
def test_the_teacher_of_a_run_counts_and_its_cache_in_its_place(tmp_path):
    """Held against the bytes of the arrays that a run places."""
    teacher = tmp_path / "teacher"
    random_run(teacher, byte_model(32, *TEACHER))
    asked = [x for x in MODEL if "vocab" not in x] + ["data.tokenizer.name=bytes", "mesh.fsdp=2"]

    def counted(name, **fields):
        given = [f"objective.{key}={value}" for key, value in {"name": name, **fields}.items()]
        w = load_workload("quickstart", [*asked, *given], jax.devices()[:2], True)
        return w, reference_bytes(w.config, w.mesh, w.spec.dtype, w.vocab_size)

    w, found = counted("distill", teacher=teacher)
    with jax.set_mesh(w.mesh):
        params = load_frozen("key", str(teacher), byte_tokenizer(), w.mesh, w.spec.dtype)[1]
    param_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    head = 2 * params["head"].size
    assert (
        found == param_bytes + head + 2 * 96 * 8 * 64
    )  # of 16 rows of 64 tokens a device has half
    few = counted("distill", teacher=teacher, cache="none", top_k=5)[1]
    assert few == (5 * 2 + 6 * 2) * 8 * 64
    assert counted("selective", reference=teacher)[1] == param_bytes + 4 * 8 * 64
    with pytest.raises(UserError, match="is not a run directory"):
        counted("distill", teacher=tmp_path / "none")


def test_the_teacher_is_in_the_dry_runs_sum_and_report(tmp_path):
    random_run(tmp_path / "teacher", byte_model(32, *TEACHER))
    plain = [x for x in ONE_LAYER if "vocab" not in x] + ["data.tokenizer.name=bytes"]
    taught = [*plain, "objective.name=distill", f"objective.teacher={tmp_path / 'teacher'}"]
    one, two = (preflight.preflight("quickstart", x, 1, "H200") for x in (plain, taught))
    a, b = one["metrics"], two["metrics"]
    assert a["reference_bytes"] == 0 < b["reference_bytes"]
    assert b["total_bytes"] - b["activations_bytes"] - b["reference_bytes"] == pytest.approx(
        a["total_bytes"] - a["activations_bytes"]
    )
    assert "the teacher or reference model" in report(two)


@pytest.mark.slow
def test_lora_on_a_model_of_a_billion_parameters_fits_a_t4():
    record = preflight.preflight("llama_1b_lora_t4", [], 1, "T4")
    m = record["metrics"]
    assert 1.05e9 < record["workload"]["parameters"] < 1.15e9
    assert m["fits"] and m["total_bytes"] < 0.9 * 15 * 2**30
    assert m["frozen_bytes"] > 2 * 1.0e9  # a copy of the weights, and one only
    assert m["frozen_bytes"] < 2 * 1.2e9


def test_bad_input(capsys):
    for argv, message in {
        ("--dry-run",): "--dry-run: say of which configuration, as in --config gpt_d12",
        ("--config", "quickstart", "--dry-run", "--devices", "99"): "this process has started with",
        ("--config", "quickstart", "--dry-run", "--devices", "8", "mesh.fsdp=3"):
            "mesh.fsdp=3 does not divide the number of devices, 8; these would: 1, 2, 4, 8",
    }.items():  # fmt: skip
        assert main(list(argv)) == 2
        assert message in capsys.readouterr().err


def test_a_deep_model_is_carried_on_from_whole_periods_of_its_layers(monkeypatch):
    depths, found = [], preflight.Facts(1.0, [])
    record = lambda w: depths.append(w.config.model.depth) or found
    monkeypatch.setattr(preflight, "facts_of", record)
    pattern = ["model.depth=48", "model.window_pattern=SL"]
    w = load_workload("moe_tiny", [*pattern, "model.moe.every=3"], jax.devices()[:1])
    preflight.measured(w)
    assert depths == [6, 12], "a third of their layers have experts, as of all 48"


def test_the_longest_row_is_looked_for_by_lines():
    """Bytes grow by 5 a token at first and by 3 later: the first line's answer is too short."""
    bytes_of = lambda n: 1000 + 5 * min(n, 9000) + 3 * max(n - 9000, 0)
    needed = {n: bytes_of(n) for n in (4096, 8192)}
    while (n := memory.next_length(needed, 1e5)) is not None:
        assert n % memory.STEP == 0 and n not in needed
        needed[n] = bytes_of(n)
    longest = max(n for n, size in needed.items() if size < 100_000)
    assert longest == 26624 and len(needed) <= 2 + memory.REFINED  # 27,000 by the formula
    assert memory.next_length({4096: 99, 8192: 101}, 90.0) is None  # even the shortest does not fit
    steep = {4096: 10, 8192: 20, 20480: 101}  # what a line said was too long
    assert memory.next_length(steep, 100.0) == 18432
    assert memory.next_length(steep | {18432: 96}, 100.0) is None


def test_one_length_is_measured_alone_where_it_is_asked_for():
    small = ["model.depth=1", "model.width=32", "model.head_dim=32"]
    record = memory.bench_longest("quickstart", [*small, "train.sequence_length=64"], memory=2**30)
    (row,) = record["rows"]
    assert row["shape"] == "T 64" and row["total_bytes"] > 0 and record["longest"] == 64
    assert record["workload"]["overrides"] == [*small, "train.sequence_length=64"]


def test_the_scores_and_logits_of_the_references_are_counted():
    """A baseline without flash attention keeps the scores of every layer for the backward pass."""
    sizes = ["train.sequence_length=256", "train.batch_size=2", "train.device_batch_size=2"]
    known = [x for x in PLAIN if "batch_size" not in x and "sequence_length" not in x]
    naive = ["model.attention=reference", "model.kernels.loss=reference"]
    one, two = (preflight.preflight("quickstart", [*known, *sizes, *more], 1, "H200")
                for more in ([], naive))  # fmt: skip
    scores = 2 * 2 * 4 * 256 * 256 * 2  # layers x rows x heads x T x T in bfloat16, at least
    more = two["metrics"]["activations_bytes"] - one["metrics"]["activations_bytes"]
    assert more > scores
