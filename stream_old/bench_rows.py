"""Record of the joined and the streamed chains: $O/matmul-integers_streamed-*.json."""
import json, os, sys
import jax.numpy as jnp
from benchmarks import integer_chain as chain
from benchmarks.kernels import growing
from benchmarks.timing import ceilings
from jaxtrain.cluster.runtime import compute_dtype
O = os.environ.get("O", ".")
dtype = compute_dtype("auto")
def rows():
    gbps = ceilings(dtype).copy_gbps
    for name in ("chain_m1_llama_8b", "chain_m8_llama_8b"):
        s = next(c for c in chain.CHAINS if c.name == name)
        for form in ("int8", "int4"):
            for part in (chain.streamed_rows, chain.joined_rows):
                for row in part(s, form, dtype, gbps):
                    print({k: row[k] for k in ("name", "shape", "ms", "of_copy", "failed") if k in row}, flush=True)
                    yield row
for record in growing("matmul", dtype, "integers_streamed", rows()):
    json.dump(record, open(f"{O}/matmul-integers_streamed-nvidia_h200.json", "w"), indent=1)
