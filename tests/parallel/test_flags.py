"""XLA's options: what this XLA does not know never reaches a compilation of ours."""

import jax
import pytest
from jaxtrain_kernels.dispatch import on_target
from tiny import mesh_of

from benchmarks.flags import SETS, bench_flags
from jaxtrain.cluster.xla_flags import check_options, supported, why_unsupported
from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.settings import UserError
from jaxtrain.train.program import compile_step, have_symmetric_memory


def test_every_option_of_the_sets_is_known_here():
    for options in SETS.values():
        assert supported(options) == options


def test_an_option_that_this_xla_does_not_know_is_left_out():
    known = {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert supported(known | {"xla_gpu_of_another_version": True}) == known
    assert "No such compile option" in why_unsupported("xla_gpu_of_another_version", True)


def test_a_users_unknown_option_is_an_error():
    check_options({"xla_gpu_enable_command_buffer": ""})
    with pytest.raises(UserError, match="train.compiler_options: No such compile option: 'xla_no'"):
        check_options({"xla_no": True})


def test_flags_of_no_such_set():
    with pytest.raises(UserError, match="no set of flags fast; there are default, in_order"):
        next(bench_flags("quickstart", [], "fast"))


def test_a_step_has_the_sets_that_its_config_needs(monkeypatch):
    """cuBLAS, where XLA's Triton kernels win nothing; a scan runs its matmuls once."""
    seen, compiled = [], jax.jit(lambda: None).lower().compile()
    note = lambda self, compiler_options: seen.append(compiler_options) or compiled
    monkeypatch.setattr(jax.stages.Lowered, "compile", note)

    def options(*overrides, frozen=None):
        config = resolve(load_config(None, list(overrides)), 512)
        compile_step(jax.jit(lambda *given: None), None, None, None, config, frozen)
        return seen[-1]

    unrolled, base = "model.scan_layers=false", {"w": 1.0}
    assert options(unrolled) == SETS["cublas"]
    assert options(unrolled, frozen=base) is None
    assert options(unrolled, "model.ffn=swiglu") is None
    for float8 in ("model.kernels.loss=fp8_head", "model.fp8=blocks"):
        assert options(unrolled, float8, "model.ffn=swiglu") == SETS["cublas"]
    with jax.set_mesh(mesh_of(data=2)):
        assert options(unrolled) is None
    for more, expected in (({"data": 2}, SETS["gathered"]), ({"fsdp": 2}, None)):
        with jax.set_mesh(mesh_of(expert=2, **more)):
            assert options(unrolled) == expected
    assert options("model.scan_layers=true", frozen=base) == SETS["once"]
    name = "xla_gpu_enable_dynamic_slice_fusion"
    given = f"train.compiler_options={{{name}: true}}"
    assert options("model.scan_layers=true", given) == SETS["cublas"] | {name: True}


@pytest.mark.parametrize(
    ("platform", "capability", "mesh", "expected"),
    [
        ("cuda", (9, 0), {"tensor": 2}, True),
        ("cuda", (9, 0), {"expert": 2, "data": 2}, True),
        ("cuda", (9, 0), {"fsdp": 2, "data": 2}, False),
        ("cuda", (8, 0), {"tensor": 2}, False),
        ("cpu", None, {"tensor": 2}, False),
    ],
)
def test_exchanges_within_layers_of_hopper_are_in_symmetric_memory(
    platform, capability, mesh, expected
):
    with on_target(platform, capability):
        assert have_symmetric_memory(mesh_of(**mesh)) is expected
