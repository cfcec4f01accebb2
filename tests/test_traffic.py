"""Exchanges of a compiled program: by axis, in loops, over the network."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.estimate import dry_run as preflight
from jaxtrain.estimate.traffic import collectives, group_of_first, rates_of, step_seconds

MESH = {"data": 2, "fsdp": 4}

PROGRAM = """ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %g = f32[32,4]{1,0} all-gather(%x), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}
  %s = f32[8,4]{1,0} slice(%g), slice={[0:8], [0:4]}
  %w = (s32[], f32[8,4]{1,0}) tuple(%c, %s)
  %l = (s32[], f32[8,4]{1,0}) while(%w), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %d = (s32[], f32[8,4]{1,0}) while(%l), condition=%cond, body=%uneven
  ROOT %r = f32[8,4]{1,0} get-tuple-element(%d), index=1
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %y = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %a = f32[8,4]{1,0} all-reduce(%y), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %a)
}

%uneven (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %y = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %e = f32[8,4]{1,0} all-to-all(%y), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %e)
}
"""  # noqa: E501


def test_exchanges_are_counted_by_axis_and_in_loops():
    found = {c.kind: c for c in collectives(PROGRAM, MESH)}
    assert found["all-gather"][1:] == (("fsdp",), 4, 1, 3 * 128)
    assert found["all-reduce"][1:] == (("data",), 2, 5, 5 * 2 * 0.5 * 128)
    assert "all-to-all" not in found  # nobody knows how often that loop runs


@pytest.mark.slow
def test_a_sum_of_which_each_device_takes_a_part_is_a_reduce_scatter():
    """The CPU's compiler leaves it a sum and a slice: of a product in bfloat16, which it widens;
    over two axes, of which one parts it; and of two sums in one, of which one is read whole."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    shard_over = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    rows, parted = shard_over(("data", "fsdp"), None), shard_over("fsdp", None)

    def sums(x, y):
        dw = jax.lax.with_sharding_constraint(x.T @ y, parted)
        return dw, jnp.sum(y.astype(jnp.float32), axis=0)

    given = [jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=rows)] * 2
    f = jax.jit(sums, out_shardings=(parted, shard_over()))
    text = f.lower(*given).compile(compiler_options=preflight.OPTIONS).as_text()
    found = {c[:3]: c.bytes for c in collectives(text, MESH)}
    assert "reduce-scatter(" not in text and "all-reduce(" in text
    assert found == {
        ("reduce-scatter", ("fsdp",), 4): 2 * 32 * 32 * 3 / 4,
        ("all-reduce", ("data",), 2): 2 * 32 * 32 / 4,
        ("all-reduce", ("data", "fsdp"), 8): 4 * 32 * 2 * 7 / 8,
    }


def test_groups_in_every_notation():
    for text, group in {
        "replica_groups={{0,2},{1,3}}": [0, 2],
        "replica_groups=[2,4]<=[8]": [0, 1, 2, 3],
        "replica_groups=[4,2]<=[2,4]T(1,0)": [0, 4],
        "replica_groups=mesh['axis_0'=8] {'axis_0'}": list(range(8)),
        "replica_groups=mesh['a'=2,'b'=4] {'a'}": [0, 4],
        "source_target_pairs={{0,1},{1,0}}": [0, 1],
        "source_target_pairs={{0,0},{1,2},{2,1}}": [1, 2],  # the first keeps its own
        "replica_groups={}": list(range(8)),
    }.items():
        assert group_of_first(text, 8) == group, text


def test_what_crosses_hosts_takes_the_network():
    sent = collectives(PROGRAM, MESH)
    flops = 989e12 * rates_of("H200").mfu
    compute, near, far = step_seconds(flops, sent, "H200", {"data": 2, "fsdp": 1})
    assert compute == pytest.approx(1.0)
    assert (near, far) == (pytest.approx(384 / 450e9), pytest.approx(640 / 50e9))
