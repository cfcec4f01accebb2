"""What a compiled program costs: bytes and products read from its text."""

import jax
import jax.numpy as jnp

from benchmarks import profile
from benchmarks.costs import Cost, in_order, read_costs

GPU_PROGRAM = """HloModule jit_f, is_scheduled=true

%fused_slice (param_0.1: bf16[8,1024], param_1.1: s32[]) -> bf16[1024] {
  %param_0.1 = bf16[8,1024]{1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %ds.1 = bf16[1,1024]{1,0} dynamic-slice(%param_0.1, %param_1.1, %zero.1), \
dynamic_slice_sizes={1,1024}
  ROOT %bitcast.9 = bf16[1024]{0} bitcast(%ds.1)
}

%body (arg.1: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %arg.1 = (s32[], bf16[64,32]{1,0}) parameter(0)
  %gemm.1 = (bf16[64,16]{1,0}, s8[4096]{0}) custom-call(%arg.1#1, %arg.1#1), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]}}}
  ROOT %tuple.1 = (s32[], bf16[64,32]{1,0}) tuple(%arg.1#0, %arg.1#1)
}

ENTRY %main.1 (x.1: bf16[8,1024], i.1: s32[], s.1: (s32[], bf16[64,32])) -> bf16[1024] {
  %x.1 = bf16[8,1024]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %s.1 = (s32[], bf16[64,32]{1,0}) parameter(2)
  %while.1 = (s32[], bf16[64,32]{1,0}) while(%s.1), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %slice_fusion = bf16[1024]{0} fusion(%x.1, %i.1), kind=kLoop, calls=%fused_slice
}
"""


def test_costs_count_loops_slices_and_products():
    gemm, sliced = read_costs(GPU_PROGRAM)
    assert gemm == Cost("gemm.1", 3, 2 * 64 * 16 + 4096 + 2 * 2 * 64 * 32, 2.0 * 64 * 16 * 32, True)
    assert sliced == Cost("slice_fusion", 1, 2 * 1024 + 2 * 1024 + 4, 0.0, False)
    assert in_order([gemm, sliced]) == [gemm] * 3


def test_a_librarys_matmuls_are_told_by_their_order():
    costs = read_costs(GPU_PROGRAM)
    gemms = [profile.Event(f"nvjet_{i}", "command_buffer", 10.0 * i, 1.0) for i in range(9)]
    other = profile.Event("void cublasLt::splitKreduce_kernel<32>", "", 100.0, 1.0)
    assert profile.costs_of([other, *gemms], costs, steps=3) == [None, *[costs[0]] * 9]
    assert profile.costs_of(gemms[1:], costs, steps=3) == [None] * 8


def test_costs_of_a_program_of_this_device():
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    program = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(x).compile().as_text()
    assert sum(cost.flops for cost in read_costs(program)) == 2 * 64 * 64 * 32
    assert sum(cost.bytes for cost in read_costs(program)) >= 4 * (64 * 32 + 64 * 64)
