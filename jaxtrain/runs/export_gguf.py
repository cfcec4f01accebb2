"""Export a run as one GGUF file, for llama.cpp and programs that use it."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.data import make_chat, training_template
from jaxtrain.interop.companions import chat_template
from jaxtrain.runs.export_model import prepare_export, token_ids
from jaxtrain.settings import UserError

if TYPE_CHECKING:
    from jaxtrain.interop.gguf_file import Written


def export_gguf(run: Path, out: Path, outtype: str = "f16", family: str | None = None) -> "Written":
    """Write a run's model as the file `out`. outtype: f32, f16, bf16, q8_0 or q4_k.

    Raises UserError if the file exists, if llama.cpp would compute the model or tokenizer
    differently, or if the package gguf is not installed. Nothing is written then.
    """
    try:
        from jaxtrain.interop.gguf_file import FamilyModel, write_gguf
        from jaxtrain.interop.gguf_tokenizer import vocabulary_of
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise UserError(
            "--format gguf needs the package gguf: uv sync --extra gguf, or install the "
            "wheel with [gguf]"
        ) from None
    if out.suffix != ".gguf" or out.is_dir():
        raise UserError(f"{out}: --format gguf needs a file name that ends in .gguf")
    if out.exists():
        raise UserError(f"{out} already exists; name another file")
    saved, source_config, model, specs, params, row, config = prepare_export(run, family)
    source = FamilyModel(row, config, model, specs, params)
    talk = training_template(saved.config.data)
    ids = token_ids(saved, source_config)
    eos = ids["eos_token_id"]
    facts = {
        "name": saved.config.run.name,
        "bos": saved.tokenizer.bos_id,
        "eos": next(iter(eos), None) if isinstance(eos, list) else eos,
        "eot": make_chat(*talk, saved.tokenizer).end if talk else None,
        "pad": ids["pad_token_id"],
        "add_bos": saved.prompting.bos,
        "chat_template": talk[0] if talk else chat_template(saved.tokenizer_dir),
    }
    vocabulary = vocabulary_of(saved.tokenizer, config["vocab_size"])
    return write_gguf(out, source, vocabulary, outtype, facts)


def export_summary(out: Path, written: "Written") -> str:
    """Lines for the terminal: size, bits per parameter, and the rounding error of each type."""
    bits = 8 * written.bytes / written.weights
    lines = [
        f"exported {out} as {written.architecture}: {written.bytes:,} bytes, {bits:.2f} bits a "
        f"parameter, context of {written.context_length} tokens"
    ]
    if written.shortened:
        lines[0] += f" (the sliding window: llama.cpp's {written.architecture} has none)"
    for name, loss in written.losses.items():
        error = f", relative squared error {loss.relative:.3g}" if loss.error else ", exact"
        lines.append(f"{name:8} {loss.tensors} tensors, {loss.weights:,} parameters{error}")
    return "\n".join(lines)
