"""Breaks one core line of each advertised feature and asks the default tier whether it notices.

python tests/mutate.py [--jobs N] [NAME ...]: each mutation is tried in a copy of the tree, with the
default-tier tests of the files named beside it. Prints a line for each; exits with 1 if one
survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """In `file` the line `old` (once) becomes `new`; `tests` are files below tests/."""

    file: str
    old: str
    new: str
    tests: str


J, K = "jaxtrain/", "kernels/jaxtrain_kernels/"
MUTATIONS = {
    "accumulation": Mutation(
        J + "train/step.py", "lambda t, x: t + x.astype(t.dtype)", "lambda t, x: x.astype(t.dtype)",
        "test_step.py",
    ),
    "clip": Mutation(
        J + "train/step.py",
        "shrink = jnp.minimum(1.0, ", "shrink = jnp.maximum(1.0, ", "test_step.py"
    ),
    "loss scale": Mutation(
        J + "train/step.py", "g.astype(jnp.float32) / loss_scale", "g.astype(jnp.float32)",
        "test_float16.py test_step.py",
    ),
    "diloco": Mutation(
        J + "train/local_sgd.py",
        "c.outer_lr * (way + c.outer_momentum * v)", "0.0 * way", "test_local.py"
    ),
    "gossip": Mutation(
        J + "train/local_sgd.py", 'total += jax.lax.ppermute(x, "data", shift(by))', "total += x",
        "test_local.py",
    ),
    "remat": Mutation(
        J + "model/remat.py", "if remat not in POLICIES:", "if True:", "model/test_remat.py",
    ),
    "muon": Mutation(
        J + "optim/muon.py", "square_polynomial(a, polynomial, implementation=implementation) @ x",
        "square_polynomial(a, coefficients[0], implementation=implementation) @ x",
        "optim/test_muon.py",
    ),
    "normuon": Mutation(
        J + "optim/muon.py", "lines = jax.lax.rsqrt(jnp.maximum(now, 1e-10))",
        "lines = jnp.ones_like(now)", "oracle/test_oracle_optim.py",
    ),
    "schedule": Mutation(
        J + "optim/schedule.py", "left = 1 - progress", "left = 1.0", "optim/test_schedule.py"
    ),
    "lora": Mutation(
        J + "finetune/lora.py", "return c.alpha / (math.sqrt(c.rank) if c.rslora else c.rank)",
        "return c.alpha", "finetune/test_peft.py",
    ),
    "dora": Mutation(
        J + "finetune/lora.py", "= column_norms(matrices[name], a, b, scale)",
        "= start[f\"{name}/magnitude\"]", "finetune/test_tuning.py",
    ),
    "nf4": Mutation(
        J + "weights/quantized.py", "jnp.asarray(NF4)[codes] * most[:, None]",
        "jnp.asarray(NF4)[codes] * self.mean", "finetune/test_packed.py",
    ),
    "dpo": Mutation(
        J + "objectives/dpo.py",
        "return PreferenceLoss(-(1 - smooth) * right_N - smooth * wrong_N,",
        "return PreferenceLoss(-(1 - smooth) * right_N,", "finetune/test_preference.py",
    ),
    "kto": Mutation(
        J + "objectives/kto.py", "gain_N = reward_N2[..., 0] - c.beta * divergence",
        "gain_N = reward_N2[..., 0]", "finetune/test_preference.py",
    ),
    "sft": Mutation(
        J + "data/chat/chat.py", "answers.append((len(begun), len(text)))",
        "answers.append((0, len(text)))", "data/test_chat.py",
    ),
    "float8": Mutation(
        J + "weights/float8.py", "most_L = jnp.max(past_HL, axis=0)", "most_L = past_HL[-1]",
        "model/test_fp8_delayed.py",
    ),
    "experts": Mutation(
        J + "model/moe.py", "h_MF = (h_MF * weights_M1).astype(x_MD.dtype)",
        "h_MF = h_MF.astype(x_MD.dtype)", "model/test_moe.py",
    ),
    "context parallel": Mutation(
        J + "parallel/context.py", "halves[:, 1, ::-1]", "halves[:, 1]", "parallel/test_context.py"
    ),
    "pipeline": Mutation(
        J + "parallel/pipeline.py", "shift = chunk // repeats // (stages // gcd(stages, repeats))",
        "shift = chunk * 0", "parallel/test_pipeline.py",
    ),
    "tensor parallel": Mutation(
        J + "parallel/axes.py", "lambda axis, _, g: (g * jax.lax.axis_size(axis),)",
        "lambda axis, _, g: (g,)", "parallel/test_experts.py",
    ),
    "zero": Mutation(
        J + "parallel/axes.py", 'without = None if kind in ZERO[zero] else "fsdp"',
        "without = None", "parallel/test_mesh.py",
    ),
    "masking": Mutation(
        J + "data/batches/augment.py", "hidden &= random.random(len(hidden)) < config.rate", "pass",
        "data/test_augment.py",
    ),
    "fill in the middle": Mutation(
        J + "data/batches/augment.py", "order = [prefix, suffix, after, middle, before, between]",
        "order = [prefix, suffix, after, middle, between, before]", "data/test_augment.py",
    ),
    "decontaminate": Mutation(
        J + "data/filters/decontaminate.py", ">= config.min_hits", "> config.min_hits",
        "data/test_quality.py data/test_filtered.py",
    ),
    "core": Mutation(
        J + "evaluation/log_likelihood.py",
        "- label_N\n        new", "+ label_N\n        new", "evaluation/test_tasks.py"
    ),
    "el2n": Mutation(
        J + "evaluation/document_scores.py",
        "error_NV = jnp.exp(logits_NV - top_N[:, None]) - hot_NV",
        "error_NV = jnp.exp(logits_NV - top_N[:, None])", "test_score.py",
    ),
    "sampling": Mutation(
        J + "inference/generate.py",
        "scaled_BV = jnp.where(scaled_BV < least_B1, -jnp.inf, scaled_BV)",
        "pass", "test_generate.py",
    ),
    "int8 cache": Mutation(
        K + "attention/decode.py", "jnp.abs(wide_BSKH).max(-1) / 127",
        "jnp.abs(wide_BSKH).max(-1) / 64", "kernels/test_decode.py test_int8_cache.py",
    ),
    "import": Mutation(
        J + "interop/layouts.py", "lambda x, h: 1 + x.astype(np.float32)",
        "lambda x, h: x.astype(np.float32)", "interop/test_families.py",
    ),
    "resume": Mutation(
        J + "train/feed.py", "self._loader = self._open(state=position)\n        self._next:",
        "self._loader = self._open(state=None)\n        self._next:", "test_train.py",
    ),
    "flash backward": Mutation(
        K + "attention/xla.py", "out.astype(lse.dtype) * dout.astype(lse.dtype), -1) - dlse",
        "out.astype(lse.dtype) * dout.astype(lse.dtype), -1)", "kernels/test_attention.py",
    ),
    "loss": Mutation(
        K + "cross_entropy/xla.py", "(1 + 2 * options.z_loss * lse_C)",
        "(1 + options.z_loss * lse_C)", "kernels/test_cross_entropy.py",
    ),
    "stochastic depth": Mutation(
        J + "model/stochastic_depth.py", ".astype(jnp.float32) / keep", ".astype(jnp.float32)",
        "model/test_stochastic_depth.py",
    ),
    "fake quantization": Mutation(
        J + "weights/fake_quant.py", "return (steps * scale).astype(w.dtype)", "return w",
        "model/test_matrices.py",
    ),
    "saved activations": Mutation(
        J + "model/saved_activations.py", "kept = [compress(x) if x.ndim > 1 else x for x in",
        "kept = [x for x in", "model/test_saved_activations.py",
    ),
    "multi-token": Mutation(
        J + "objectives/multi_token.py", "total = total + weight * found", "total = total + found",
        "test_multi_token.py",
    ),
    "cautious": Mutation(
        J + "optim/cautious.py", "(u * g < 0)", "(u * g > 0)", "optim/test_wrappers.py"
    ),
    "ema": Mutation(
        J + "optim/ema.py", "(d * a + (1 - d) * p)", "((1 - d) * a + d * p)",
        "optim/test_wrappers.py",
    ),
    "ema evaluation": Mutation(
        J + "optim/ema.py", "eval_params=lambda state, params: state.average",
        "eval_params=lambda state, params: params", "optim/test_wrappers.py",
    ),
    "lora-fa": Mutation(
        J + "finetune/lora.py", 'return c.freeze_a and name.endswith("/a")', "return False",
        "finetune/test_tuning.py",
    ),
    "ia3": Mutation(
        J + "finetune/ia3.py", "return AdaptedWeight(w, rows=", "return AdaptedWeight(w, columns=",
        "finetune/test_methods.py",
    ),
    "freeze": Mutation(
        J + "finetune/partition.py", "x if below is None else jnp.concatenate(",
        "x if below is None or True else jnp.concatenate(", "finetune/test_methods.py",
    ),
    "adapter": Mutation(
        J + "model/layers.py", "return y_BTD + dense(h_BTA, self.up)", "return y_BTD",
        "finetune/test_methods.py",
    ),
    "added modules": Mutation(
        J + "finetune/partition.py", "if spec.group == c.name}", "if spec.group != c.name}",
        "finetune/test_methods.py",
    ),
    "ipo": Mutation(
        J + "objectives/ipo.py", "1 / (2 * c.beta)", "1 / c.beta",
        "finetune/test_preference.py",
    ),
    "orpo": Mutation(
        J + "objectives/orpo.py",
        "- c.beta * ratio_N,", "+ c.beta * ratio_N,", "finetune/test_preference.py"
    ),
    "length ramp": Mutation(
        J + "data/batches/length_ramp.py", "sequence_length=ramp.start << i)",
        "sequence_length=ramp.start)", "data/test_length_ramp.py",
    ),
    "phases": Mutation(
        J + "train/loop.py", "if not program.fits(batch):", "if False:",
        "test_train.py",
    ),
    "growing models": Mutation(
        J + "train/growth.py", "self.copies(old.shape[dim], new.shape[dim])",
        "np.arange(new.shape[dim]) % old.shape[dim]", "test_phases.py",
    ),
    "aliases": Mutation(
        J + "config/aliases.py", "if spelling in TARGETS:", "if False:", "test_aliases.py"
    ),
    "incompatible features": Mutation(
        J + "config/compatible.py", "if lines:\n        raise UserError(*lines)", "pass",
        "test_compatible.py",
    ),
    "background compile": Mutation(
        J + "train/program.py", "with jax.set_mesh(mesh):\n                job()", "pass",
        "test_train.py",
    ),
    "events": Mutation(
        J + "train/events.py", "step % self.every == 0", "step % self.every == 1", "test_train.py"
    ),
    "coordinator": Mutation(
        J + "cluster/coordinator.py", "if (lines := differing_facts(told[0], told[i]))",
        "if (lines := differing_facts(told[0], told[0]))", "parallel/test_coordinator.py",
    ),
    "own loss": Mutation(
        J + "train/fit.py", "return loss(nnx.merge(graphdef, params), batch.arrays)",
        "return 0 * loss(nnx.merge(graphdef, params), batch.arrays)", "test_api.py",
    ),
    "public model": Mutation(
        J + "train/fit.py", "model.params = gather_to_host(", "_ = gather_to_host(", "test_api.py"
    ),
}  # fmt: skip


def attempt(name: str, m: Mutation, timeout: float) -> tuple[str, str]:
    """(name, what became of it)."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy.mkdir()
        for part in ROOT.iterdir():
            if part.name not in (".git", ".venv", ".cache", "runs", "shared"):
                (shutil.copytree if part.is_dir() else shutil.copy)(part, copy / part.name)
        text = (copy / m.file).read_text()
        if text.count(m.old) != 1:
            return name, f"NOT APPLIED: {m.file} has the line {text.count(m.old)} times"
        (copy / m.file).write_text(text.replace(m.old, m.new))
        env = os.environ | {
            "PYTHONPATH": f"{copy}:{copy / 'kernels'}:" + os.environ.get("PYTHONPATH", "")
        }
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-tests"))
        files = [str(copy / "tests" / part) for part in m.tests.split()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            *files,
        ]
        try:
            done = subprocess.run(
                command, cwd=copy, env=env, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return name, "timed out"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return name, "killed by " + failed[0].split(" - ")[0].split("/tests/")[-1]
    return name, "SURVIVED" if done.returncode == 0 else f"NOT RUN: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MUTATIONS, []], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one of them")
    a = parser.parse_args()
    chosen = a.names or list(MUTATIONS)
    survived = 0
    with ThreadPoolExecutor(a.jobs) as pool:
        jobs = [pool.submit(attempt, name, MUTATIONS[name], a.timeout) for name in chosen]
        for job in as_completed(jobs):
            name, what = job.result()
            print(f"{name:22s} {what}", flush=True)
            survived += not what.startswith("killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
