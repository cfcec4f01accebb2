"""A dry run's record as lines for the screen."""

from typing import Any

from jaxtrain.estimate.dry_run import USABLE
from jaxtrain.runs.metrics import format_bytes


def often(times: float) -> str:
    return f"{times:,.0f} times" if times >= 1 else f"every {1 / times:,.0f} steps"


def milliseconds(time: float) -> str:
    """A time in ms, with two digits if it is short."""
    return f"{time:,.0f} ms" if time >= 10 or time == 0 else f"{time:.2g} ms"


def report(record: dict[str, Any]) -> str:
    """The record as lines for the screen."""
    m, w = record["metrics"], record["workload"]
    tuned = f" and {w['trained']:,} that train" if "trained" in w else ""
    mesh = " x ".join(f"{axis} {n}" for axis, n in w["mesh"].items())
    lines = [
        f"{record['config']}: {w['parameters']:,} parameters{tuned}, {record['variant']}, "
        f"{w['batch_size']} x {w['sequence_length']} tokens a step, {w['device_batch_size']} rows "
        f"a device at once, remat {w['remat']}",
        f"on {record['device_count']} x {record['device']}"
        + f": {mesh}, ZeRO-{w['zero']}" * (mesh != ""),
        "a device holds",
    ]
    other_params = {"frozen": "frozen weights", "reference": "the teacher or reference model"}
    names = {kind: text for kind, text in other_params.items() if m[f"{kind}_bytes"]} | {
        "parameters": "float32 weights", "states": "optimizer states",
        "copy": "weights in the compute dtype", "gradients": "gradients",
        "activations": "activations and scratch (estimate)", "total": "in all",
    }  # fmt: skip
    lines += [f"  {format_bytes(m[f'{k}_bytes']):>10s}  {text}" for k, text in names.items()]
    fits = "fits" if m["fits"] else "does NOT fit"
    lines[-1] += f" of {format_bytes(m['device_bytes'])}: {fits} ({USABLE:.0%} may be taken)"
    if m["host_bytes"]:
        lines += [f"  {format_bytes(m['host_bytes']):>10s}  of states in the memory of all hosts"]
    if m["files_bytes"]:
        size = format_bytes(m["files_bytes"])
        lines += [f"  {size:>10s}  of states in files, read and written in each step"]
    compute, near, far = m["compute_ms"], m["near_ms"], m["far_ms"]
    if mesh:
        lines += ["a device sends in a step"]
        lines += [
            f"  {format_bytes(c['bytes']):>10s}  {c['kind']} over {', '.join(c['axes'])} "
            f"({c['group_size']} devices), {often(c['times'])}"
            for c in record["collectives"]
        ] or ["  nothing"]
        lines += [
            f"a step takes {milliseconds(max(compute, near + far))} if all exchanges are hidden, "
            f"{milliseconds(compute + near + far)} if none is (estimate: compute "
            f"{milliseconds(compute)}, within hosts {milliseconds(near)}, between hosts "
            f"{milliseconds(far)})"
        ]
    else:
        lines += [f"a step takes {milliseconds(compute)} (estimate)"]
    if w.get("autofreeze"):
        lines += [
            "a step costs that until layers freeze (train.autofreeze); when is not known before"
        ]
    return "\n".join(lines + [record["advice"]] * (record["advice"] is not None))
