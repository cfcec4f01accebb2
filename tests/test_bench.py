import importlib
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels.shapes import LOSS_BENCH
from tiny import FEW_PARTS, assignments

from benchmarks import kernels, profile, record, tables, timing
from benchmarks import memory as memory_module
from benchmarks import step as step_module
from benchmarks.costs import Cost
from benchmarks.random_inputs import random_batch
from benchmarks.step import floors_ms, muon_flops
from jaxtrain.estimate.workload import load_workload
from jaxtrain.settings import UserError

command = importlib.import_module("benchmarks.__main__")
main = command.main
TINY = ["train.batch_size=8", "train.sequence_length=32", "model.depth=1", "model.width=32",
        "model.head_dim=8", "data.tokenizer.vocab_size=300", *assignments(**FEW_PARTS)]  # fmt: skip
SCHEMA = {"bench", "config", "variant", "device", "device_count", "peers", "floor", "versions",
          "commit", "when"}  # fmt: skip


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.001)


def recorded(tmp_path, *argv):
    """The JSON that a command line writes."""
    assert main([*argv, "--record", "--out", str(tmp_path)]) == 0
    (path,) = (p for p in tmp_path.glob("*.json") if "-profile" not in p.name)
    return json.loads(path.read_text())


@pytest.mark.slow
def test_step_records_a_profiled_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_COMMIT", "abc123")
    before_parts, parts_ms = [], step_module.parts_ms

    def parts(*arguments):
        before_parts.extend(p for p in tmp_path.glob("*.json") if "-profile" not in p.name)
        return parts_ms(*arguments)

    monkeypatch.setattr(step_module, "parts_ms", parts)
    result = recorded(tmp_path, "step", "--config", "quickstart", "--profile", *TINY)
    assert SCHEMA | {"metrics", "workload", "kinds"} <= set(result)
    assert result["commit"] == "abc123"
    assert result["workload"]["batch_size"] == 8 and result["device_count"] == 8
    assert len(before_parts) == 1  # recorded, however long the parts take to compile
    m = result["metrics"]
    assert m["tokens_per_s"] == pytest.approx(8 * 32 / m["ms"] * 1e3)
    # Two to measure a step's time, 4 to 16 to warm up, three windows of 2 to 10, one for the loss.
    assert 2 + 4 + 6 + 1 <= m["steps"] <= 2 + 16 + 30 + 1
    assert m["ms_forward_backward"] > 0 and m["ms_optimizer"] > 0 and m["compile_s"] > 0
    assert m["peak_bytes"] >= m["temp_bytes"] > 0
    assert 0 < m["loss"] < 2 * np.log(300)
    assert result["floor"]["ms"] > 0 and result["floor"]["ms_optimizer"] > 0
    (path,) = tmp_path.glob("*-profile.json")
    table = json.loads(path.read_text())
    assert sum(kernel["share"] for kernel in table["kernels"]) == pytest.approx(1)
    assert any("muon.py" in kernel["from"] for kernel in table["kernels"])
    assert (tmp_path / path.name.replace(".json", ".zip")).stat().st_size > 0
    assert "jaxtrain, fp32, batch 8" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_is_measured_beside_a_peer(monkeypatch):
    """Its process measures the second row when the first one has come."""
    done, limits = [], timing.ceilings(jnp.dtype("float32"))
    monkeypatch.setattr(kernels, "ceilings", lambda dtype: done.append("ceilings") or limits)

    def peer():
        done.append("the peer begins")
        yield {"name": "a", "shape": "s", "backend": "b", "ms": 2.0}

    assert len(list(kernels.growing("x", jnp.dtype("float32"), None, peer()))) == 1
    assert done[:2] == ["ceilings", "the peer begins"]


@pytest.mark.slow
def test_techniques_are_recorded_one_by_one(tmp_path, monkeypatch):
    """The second one does not fit; the first stands in the JSON by then."""
    needs, before = memory_module.needs, []
    tries = {"none": [], "remat block": ["model.remat=block"]}

    def first_only(step):
        before.extend(tmp_path.glob("*.json"))
        if before:
            raise UserError("40 GiB are needed; try fewer rows")
        return needs(step)

    monkeypatch.setattr(memory_module, "TECHNIQUES", tries)
    monkeypatch.setattr(memory_module, "needs", first_only)
    rows = recorded(tmp_path, "memory", "--config", "quickstart", "--techniques", *TINY)["rows"]
    assert [row["name"] for row in rows] == list(tries)
    assert rows[0]["total_bytes"] > 0 and rows[1]["failed"] == "40 GiB are needed"


@pytest.mark.slow
def test_memory_and_optimizers(tmp_path):
    memory = recorded(tmp_path / "m", "memory", "--config", "quickstart", *TINY)["metrics"]
    assert memory["total_bytes"] >= memory["arguments_bytes"] + memory["temp_bytes"] > 0
    lora = [
        "finetune.name=lora",
        "finetune.rank=2",
        "optim.name=adamw",
        "finetune.base_quantization=int8",
    ]
    lora += ["optim.schedule.name=constant"]
    tuned = recorded(tmp_path / "l", "memory", "--config", "quickstart", *TINY, *lora)
    assert tuned["workload"]["trained"] < tuned["workload"]["parameters"] / 8
    assert tuned["metrics"]["arguments_bytes"] < memory["arguments_bytes"] / 2
    names = ["muon", "adamw", "sgd"]
    rows = recorded(tmp_path / "o", "optim", *names, "--config", "quickstart", *TINY)["rows"]
    assert [row["name"] for row in rows] == names
    muon, adamw, sgd = rows
    assert adamw["state_bytes"] == pytest.approx(2 * sgd["state_bytes"], rel=0.01)
    assert sgd["state_bytes"] < muon["state_bytes"] < adamw["state_bytes"]
    assert muon["floor_matmul_ms"] > 0 == sgd["floor_matmul_ms"] and muon["ms"] > 0


@pytest.mark.slow
def test_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LOSS_BENCH", LOSS_BENCH[1:])
    loss = recorded(tmp_path, "loss", "--variant", "best", "xla")
    assert loss["variant"] == "best"
    (row,) = loss["rows"]
    assert row["backend"] == "xla" and row["ms"] > 0 and row["tflops"] > 0 and row["error"] < 1e-5


@pytest.mark.slow
def test_matmuls(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.02)
    record = recorded(tmp_path, "matmul", "m65536_k768_n3072", "m131072_k768_n768_e64", "gpt_d12")
    rows = {(row["name"], row["backend"]): row for row in record["rows"]}
    assert set(rows) == {
        *(("linear", b) for b in ("plain", "fp8", "fp8_xla", "fp8_delayed", "fp8_delayed_xla")),
        *(("feed_forward_relu2", b) for b in ("xla", "fp8", "fp8_delayed")),
        *((f"fp8_cast{op}{how}", "xla") for op in ("", "_relu2", "_relu2_grad")
          for how in ("", " measured")),
        *((f"norm_cast {op}{how}", "xla") for op in ("residual", "mixed")
          for how in ("", " apart")),
        ("grouped_matmul", "xla"), ("grouped_feed_forward_relu2", "matmuls"),
        ("orthogonalize", "xla"),
    }  # fmt: skip
    ceiling, copy = record["floor"]["matmul_tflops"], record["floor"]["copy_gbps"]
    for (name, _), row in rows.items():
        of_floor = row["gbps"] / copy if "cast" in name else row["tflops"] / ceiling
        assert row["floor_ms"] == pytest.approx(row["ms"] * of_floor)
        assert row.get("error", 0) == 0 or "cast" not in name
    # Three bits of mantissa, two of gradients.
    assert 1e-2 < rows["linear", "fp8"]["error"] < 0.1
    assert rows["linear", "fp8_delayed"]["error"] == rows["linear", "fp8"]["error"]
    for fp8 in ("fp8", "fp8_delayed"):
        assert 1e-2 < rows["feed_forward_relu2", fp8]["error"] < 0.15
    for name in ("feed_forward_relu2", "grouped_matmul", "orthogonalize"):
        assert rows[name, "xla"]["error"] < 1e-5
    assert rows["grouped_feed_forward_relu2", "matmuls"]["error"] < 1e-5


@pytest.mark.slow
def test_matmuls_with_integer_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.02)
    record = recorded(tmp_path, "matmul", "m8_k4096_n1024", "plain", "dot")
    rows = {(row["name"], row["backend"]): row for row in record["rows"]}
    assert list(rows) == [("fp32", "plain"), ("int8", "dot"), ("int4", "dot")]
    sizes = {"fp32": 4 * 256 * 128, "int8": 256 * 128 + 4 * 128, "int4": 256 * 64 + 2 * 2 * 128}
    for (form, _), row in rows.items():
        assert row["shape"] == "m8_k4096_n1024_small" and row["error"] < 1e-5
        assert row["gbps"] == pytest.approx(sizes[form] / row["ms"] / 1e6)
        assert row["floor_ms"] == pytest.approx(row["ms"] * row["of_copy"])


@pytest.mark.slow
def test_a_chain_of_products_with_integer_codes(tmp_path):
    record = recorded(tmp_path, "matmul", "chain_m1_gpt_d12", "plain", "dot")
    rows = {(row["name"], row["backend"]): row for row in record["rows"]}
    assert list(rows) == [("fp32", "plain"), ("int8", "dot"), ("int4", "dot")]
    weights = 2 * (2 * 256 * 256 + 2 * 256 * 512)
    for row in rows.values():
        assert row["shape"] == "chain_m1_gpt_d12_small" and row["ms"] > 0
        assert row["floor_ms"] == pytest.approx(row["ms"] * row["of_copy"])
    read = {form: row["gbps"] * row["ms"] * 1e6 for (form, _), row in rows.items()}
    assert read["fp32"] == pytest.approx(4 * weights)
    assert 1 < read["int8"] / weights < 1.1 and 1 < 2 * read["int4"] / weights < 1.1


@pytest.mark.slow
def test_a_bench_that_is_cut_short_has_its_rows(capsys):
    def rows():
        yield {"name": "a", "shape": "s", "backend": "b", "ms": 2.0, "tflops": 3.0}
        yield {"name": "c", "shape": "s", "backend": "b", "ms": None, "failed": "no memory"}
        raise KeyboardInterrupt

    records = kernels.growing("rows", jnp.dtype(jnp.float32), None, rows())
    assert [len(next(records)["rows"]) for _ in range(2)] == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(records)
    assert capsys.readouterr().out.splitlines() == ["a s b 2 ms, 3 TF/s", "c s b no memory"]


def test_a_failing_backend_loses_only_its_row():
    def broken(x):
        raise ValueError("no such thing\nat all")

    def unable(x):
        raise NotImplementedError

    assert kernels.measured(broken, [(jnp.ones(2),)], 1.0) == {
        "ms": None, "tflops": None, "failed": "ValueError: no such thing",
    }  # fmt: skip
    assert kernels.measured(unable, [(jnp.ones(2),)], 1.0) is None


def test_median_ignores_the_first_calls_and_rotates(monkeypatch):
    clock, seen = iter(range(1000)), []
    ticks = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(timing, "time", ticks)
    # A window takes one tick of the clock: two calls in a second are 500 ms each.
    ms = timing.median_ms(lambda x: seen.append(x), [(0,), (1,), (2,)], calls=2, windows=4)
    assert ms == 500.0
    assert seen == [0, 1, 2] + [0, 1] * 4


def test_short_kernels_are_timed_together(monkeypatch):
    inputs = [(jnp.full((4, 4), float(i)),) for i in range(3)]
    f = lambda x: (x @ x, x.sum())
    together = jax.jit(timing.one_after_another(f))
    for ours, x in zip(together(*inputs), inputs):
        jax.tree.map(np.testing.assert_array_equal, ours, f(*x))
    assert together.lower(*inputs).as_text().count("optimization_barrier") == 2
    timed = []
    monkeypatch.setattr(timing, "median_ms", lambda fn, sets: timed.append(len(sets)) or 0.1)
    assert timing.kernel_ms(f, inputs) == pytest.approx(0.1 / 3)
    assert timed == [3, 1]


def test_rotating_leaves_the_cache(monkeypatch):
    make = lambda key: (jax.random.normal(key, (256,)),)
    monkeypatch.setattr(timing, "COLD_BYTES", 4 * 1024)
    sets = timing.rotating(make)
    assert len(sets) == 4 and not jnp.array_equal(sets[0][0], sets[3][0])
    monkeypatch.setattr(timing, "COLD_BYTES", 1)
    assert len(timing.rotating(make)) == 2


def test_long_steps_are_fewer(monkeypatch):
    calls = []
    step, batches = lambda batch: calls.append(batch), [(i,) for i in range(16)]
    assert step_module.steps_of_a_window(step, batches) == step_module.STEPS
    assert calls == [0, 1]  # the first may still compile
    monkeypatch.setattr(step_module, "WINDOW_SECONDS", 0.0)
    assert step_module.steps_of_a_window(step, batches) == 2


def test_batch_is_one_microbatch_unless_given():
    assert load_workload("gpt_d12").config.train.batch_size == 32 * jax.device_count()
    given = load_workload("gpt_d12", [f"train.batch_size={64 * jax.device_count()}"])
    assert given.config.train.batch_size == 2 * given.config.train.device_batch_size * 8


def test_random_batch_with_documents():
    w = load_workload("quickstart", [*TINY, "model.document_mask=true"])
    batch = random_batch(w, 0)
    assert batch.tokens_BT.shape == (1, 8, 32)
    assert np.array_equal(batch.tokens_BT[..., 1:], batch.targets_BT[..., :-1])
    assert np.array_equal(np.unique(batch.segments_BT), [1, 2, 3, 4])
    assert batch.positions_BT.max() == 7 and batch.tokens_BT.max() < w.vocab_size
    assert not np.array_equal(batch.tokens_BT, random_batch(w, 1).tokens_BT)


def test_floors_of_the_reference_models():
    """729.8M matmul weights (nanochat's d24), as many that a token meets with experts, and Polar
    Express as its formula at one shape."""
    w = load_workload("gpt_d24")
    met = lambda w: floors_ms(w, 6 * w.tokens / w.mesh.size / 1e9)["ms"] / 1e6
    assert met(w) == pytest.approx(729.8, abs=0.05)
    mixture = load_workload("gpt_d24", ["model.moe.experts=16", "model.moe.top_k=2"])
    assert met(mixture) == pytest.approx(729.8 + 24 * 1536 * 16 / 1e6, abs=0.05)  # and routers
    one = {"w": w.spec.specs["blocks"]["ffn"]["up"]}
    assert one["w"].shape == (24, 1536, 6144)
    assert muon_flops(w.config.optim, one) == 24 * 60 * 1536**3


def test_a_gpu_trace_is_read_from_the_streams_of_the_first_gpu(tmp_path):
    event = lambda at: (
        f"events {{ metadata_id: 1 offset_ps: {at} duration_ps: 2000 "
        'stats { metadata_id: 1 str_value: "dot.7" } }'
    )
    line = lambda name: f'lines {{ name: "{name}" timestamp_ns: 5 {event(1000)} }}'
    plane = lambda name, *lines: (
        f'planes {{ name: "{name}" {" ".join(lines)} '
        'event_metadata { key: 1 value { id: 1 name: "nvjet_tst" } } '
        'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }'
    )
    text = " ".join(
        [
            plane("/device:GPU:1", line("Stream #9(Compute)")),
            plane("/device:GPU:0", line("Stream #9(Compute)"), line("XLA Ops")),
            plane("/host:CPU", line("pool")),
        ]
    )
    path = tmp_path / "t.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    assert list(profile.read_events(path)) == [profile.Event("nvjet_tst", "dot.7", 6.0, 2.0)]


def test_kernels_are_grouped_by_name_and_source():
    hlo = """HloModule jit_train_step
FileNames
1 "/somewhere/jaxtrain/model/layers.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

  %loop_add_fusion.1 = f32[2] fusion(%p), metadata={op_name="jit(f)/jvp()/add" stack_frame_id=1}
  ROOT %gemm.2 = f32[2] custom-call(%p), metadata={op_name="jit(f)/transpose(jvp())/dot_general"}
"""
    source, limits = profile.sources(hlo), timing.Ceilings(100.0, 1000.0)
    assert source["loop_add_fusion_1"] == "model/layers.py:7 add"
    events = [
        profile.Event("loop_add_fusion_1", "", 0.0, 3e6),
        profile.Event("loop_add_fusion_1", "loop_add_fusion.1", 5e6, 3e6),
        profile.Event("nvjet_tst_128x256", "gemm.2", 10e6, 12e6),
        profile.Event("input_reduce_fusion_9", "", 22e6, 6e6),
    ]
    moved = [Cost("loop_add_fusion.1", 1, 1500000, 0.0, False)]
    table = profile.summarize(events, source, moved, limits)
    assert table["ms_busy"] == pytest.approx(8) and table["ms_span"] == pytest.approx(28 / 3)
    # From 3 to 5 and from 8 to 10 nothing runs; three steps.
    assert table["ms_idle"] == pytest.approx(4 / 3)
    assert [k["ms_idle_before"] for k in table["kernels"]] == pytest.approx([2 / 3, 2 / 3, 0])
    assert [k["kind"] for k in table["kinds"]] == ["matmul", "elementwise", "reduction"]
    top, second, _ = table["kernels"]
    assert (top["name"], top["from"]) == ("nvjet_tst_128x256", "dot_general backward")
    assert second["calls"] == pytest.approx(2 / 3) and second["share"] == pytest.approx(0.25)
    # Twice 1.5 MB at 1000 GB/s are 3 us of the 6 ms; nothing is known of the others.
    assert second["bytes"] == pytest.approx(1e6) and second["floor"] == pytest.approx(5e-4)
    assert "floor" not in top


def test_what_is_exchanged_while_nothing_else_runs_is_counted_apart(capsys):
    """Two exchanges beside each other, from 2 to 9; kernels until 4, of which one starts within,
    and from 8 on."""
    kernel = lambda start, end: profile.Event("nvjet_tst", "", start * 3e6, (end - start) * 3e6)
    nccl = lambda start, end: kernel(start, end)._replace(name="ncclDevKernel_AllGather_RING_LL")
    events = [kernel(0, 3), nccl(2, 6), kernel(2.5, 4), nccl(5, 9), kernel(8, 10)]
    events[1] = events[1]._replace(name="stream_executor::gpu::RaggedAllToAllKernelImpl<long, 8>")
    found = profile.hidden(events, {})
    assert found == {"ms": pytest.approx(7), "ms_alone": pytest.approx(4)}
    assert profile.hidden(events[:1], {}) == {"ms": 0.0, "ms_alone": 0.0}
    sent = {
        "kind": "all-gather",
        "axes": ("data", "fsdp"),
        "group_size": 4,
        "times": 2.0,
        "bytes": 3e9,
    }
    table = profile.summarize(events, {}, [], timing.Ceilings(100.0, 1000.0))
    profile.show(table | {"exchanges": {"sent": [sent], **found}})
    said = capsys.readouterr().out
    assert "7.00 ms, 4.00 with nothing else" in said and "data x fsdp" in said and "3.00" in said


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16", "collective"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "matmul"),
        ("gemm_fusion_dot_12", "matmul"),
        ("input_scatter_fusion", "scatter/gather"),
        ("input_multiply_reduce_fusion_3", "reduction"),
        ("loop_transpose_fusion", "copy/transpose"),
        ("MemcpyD2D", "copy/transpose"),
        ("loop_concatenate_fusion_2", "elementwise"),
        ("some_kernel", "other"),
    ],
)
def test_kinds(name, kind):
    assert profile.kind_of(name, "") == kind


def test_page_is_current():
    for path in tables.PAGES:
        page = path.read_text()
        assert page == tables.render(page, record.read_results()), "python -m benchmarks table"


def test_render_puts_ours_the_floor_and_the_peers():
    result = {
        "bench": "step", "config": "gpt_d12", "variant": "bf16", "device": "NVIDIA H200",
        "device_count": 1, "workload": {"batch_size": 32}, "file": "one.json",
        "metrics": {"ms": 100.0, "tokens_per_s": 655360.0, "peak_bytes": 2**30, "mfu": None},
        "floor": {"matmul_tflops": 780.0, "ms": 55.5},
    }  # fmt: skip
    page = (
        "a\n<!-- table step gpt_d12 -->\nold\n<!-- end -->\nb <!-- table step no -->\n<!-- end -->"
    )
    out = tables.render(page, [result])
    assert "old" not in out and out.startswith("a\n<!-- table step gpt_d12 -->\n| stack |")
    assert (
        "| jaxtrain, bf16, batch 32 | NVIDIA H200 | 655,360 | 100.0 | - | - | - | 1.0 GiB |" in out
    )
    assert "floor: matmuls at 780 TF/s | NVIDIA H200 | - | 55.5 |" in out
    assert "| nanochat, FA4, batch 32 | NVIDIA H200 | 579,389 |" in out
    assert out.endswith("b <!-- table step no -->\nNot measured yet.\n<!-- end -->")


def test_bad_input_is_one_line(capsys):
    assert main(["step", "--config", "gpt_d13"]) == 2
    assert "did you mean gpt_d12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("step --devices 8", "--devices 8 is for bench memory, not for bench step"),
        ("table --fit 8", "--fit 8 is for bench memory, not for bench table"),
        ("rows --tune", "--tune is for bench attention, ladder, verdicts, not for bench rows"),
        ("memory --differ train", "--differ is for bench race, not for bench memory"),
        ("memory --device T4", "--device T4 is for --devices N or --fit N, not for what is here"),
        ("memory --memory 9", "--memory is for --devices N or --fit N, not for what is here"),
        ("memory --devices 0", "--dry-run on 0 devices: there has to be one"),
    ],
)
def test_an_option_that_nothing_reads_is_one_line(argv, message, capsys, monkeypatch):
    for name in ("bench_memory", "bench_step", "bench_rows", "update_pages"):
        monkeypatch.setattr(command, name, lambda *_: pytest.fail("it is measured"))
    assert main(argv.split()) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
