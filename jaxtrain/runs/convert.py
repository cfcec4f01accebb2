"""Convert Hugging Face checkpoints to run directories (`jaxtrain import`), and runs to checkpoints
(`jaxtrain export`)."""

from pathlib import Path

import numpy as np

from jaxtrain.cluster.started_by import command_of
from jaxtrain.config import Config, save_yaml, validate
from jaxtrain.config.resolve import Resolved, resolve
from jaxtrain.data import make_chat, make_reader, training_template
from jaxtrain.data.tokenizer.tokenizer import FILES
from jaxtrain.interop.companions import (
    FOLDER,
    chat_files,
    check_aux_files,
    copy_files,
    tokenizer_files,
    tokenizer_of,
)
from jaxtrain.interop.export import check_tensors, export_weights
from jaxtrain.interop.hub_upload import open_hub, upload
from jaxtrain.interop.load import (
    find_folder,
    open_checkpoint,
    origin,
    our_file_layout,
    pin_revision,
)
from jaxtrain.interop.pretrained import LENGTH
from jaxtrain.interop.tensors import DTYPES, SHARD_BYTES, WEIGHTS, metadata_of, write
from jaxtrain.model import Transformer, split
from jaxtrain.runs.arguments import export_parser, import_parser
from jaxtrain.runs.export_gguf import export_gguf, export_summary
from jaxtrain.runs.export_model import prepare_export, token_ids
from jaxtrain.runs.model_card import write_card
from jaxtrain.runs.saved import folder_of, load_resolved
from jaxtrain.settings import UserError, command
from jaxtrain.storage.location import output_at


def import_checkpoint(path_or_repo: str, run_dir: Path) -> Resolved:
    """Write `run_dir/model/` from a checkpoint, one tensor in memory at a time.

    The weights keep their dtype. Raises UserError that names an unsupported feature.
    """
    model_dir = run_dir / "model"
    if model_dir.exists():
        raise UserError(f"{model_dir} is there already; name another run directory")
    path_or_repo = pin_revision(path_or_repo)
    source = open_checkpoint(find_folder(path_or_repo))
    check_aux_files(source.folder)
    tokenizer = tokenizer_of(source.folder, source.config["vocab_size"])
    kind = {"name": tokenizer.name}
    tree = {
        "run": {"name": run_dir.name, "directory": str(run_dir.parent)},
        "model": source.fields,
        "train": {"sequence_length": min(LENGTH, source.fields["context_length"])},
        "data": {"tokenizer": kind | {"path": str((model_dir / FILES[tokenizer.name]).resolve())}},
    }
    c = resolve(validate(Config, tree), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    table, pieces = our_file_layout(source, specs)
    model_dir.mkdir(parents=True)
    tokenizer.save(model_dir)
    copy_files(source.folder, model_dir / FOLDER)
    save_yaml(model_dir / "config.yaml", c)
    metadata = {"format": "pt", "tokenizer": tokenizer.fingerprint} | origin(path_or_repo)
    write(model_dir / WEIGHTS, table, pieces, metadata)
    return c


def export_run(
    run: Path,
    out: Path,
    family: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a run's model as a checkpoint; returns its family.

    An imported model keeps its family, vocabulary, dtype and auxiliary files.
    """
    if (out / "config.json").exists():
        raise UserError(f"{out} holds a checkpoint already; name another folder")
    saved, source_config, model, specs, params, row, config = prepare_export(run, family)
    model_dir = saved.tokenizer_dir
    kept = token_ids(saved, source_config)
    kind = dtype or source_config.get("dtype") or source_config.get("torch_dtype") or "float32"
    if kind not in NUMPY:
        raise UserError(
            f"{model_dir / FOLDER / 'config.json'}: dtype {kind} cannot be written; set --dtype to "
            f"one of {', '.join(sorted(NUMPY))}"
        )
    # All checks come before any file is written.
    check_tensors(row, config, specs, params)
    talk = training_template(saved.config.data)
    chat = make_chat(*talk, saved.tokenizer) if talk else None
    tokenizer_files(saved.tokenizer, model_dir, out)
    if talk and chat:
        template, special = talk
        # Special tokens default to the tokenizer's names, as in `make_chat`.
        chat_files(template, make_reader(saved.tokenizer).special | special, chat.end, out)
    export_weights(
        out, row, config | kept, specs, params, NUMPY[kind],
        model.head_dim, shard_bytes, base_model_metadata(run, saved.config),
    )  # fmt: skip
    return row.model_type


def base_model_metadata(run: Path, c: Resolved) -> dict[str, str]:
    """The repository and commit of the base model, or {} if it is not from a repository."""
    file = folder_of(run) / WEIGHTS
    if c.train.init_from or not file.is_file():
        return origin(c.train.init_from)
    return {k: v for k, v in metadata_of(file).items() if k.startswith("base_model")}


NUMPY: dict[str, np.dtype] = {dtype.name: dtype for dtype in DTYPES.values()}


@command
def import_main(argv: list[str] | None = None) -> int:
    """`jaxtrain import`. Returns 0, or 2 after a one-line UserError."""
    a = import_parser().parse_args(argv)
    c = import_checkpoint(a.source, a.run)
    print(f"imported {a.run}: depth {c.model.depth}, width {c.model.width}")
    print(f"more     {command_of('generate', a.run, '--prompt', '...')}")
    return 0


@command
def export_main(argv: list[str] | None = None) -> int:
    """`jaxtrain export`. Returns 0, or 2 after a one-line UserError."""
    a = export_parser().parse_args(argv)
    if not a.push_to_hub and (a.public or a.license):
        raise UserError(f"{'--public' if a.public else '--license'} needs --push-to-hub")
    if a.format == "gguf" and a.push_to_hub:
        raise UserError(
            "--push-to-hub uploads checkpoints, not GGUF files; leave out --format gguf"
        )
    if a.format == "gguf":
        if a.dtype or a.shard_bytes:
            raise UserError(
                "--dtype and --shard-bytes do not apply to --format gguf; use --outtype"
            )
        with output_at(a.out) as out:
            text = export_summary(out, export_gguf(a.run, out, a.outtype or "f16", a.family))
        print(text.replace(str(out), a.out))
        return 0
    if a.outtype:
        raise UserError("--outtype applies only to --format gguf; use --dtype")
    hub = open_hub(a.push_to_hub) if a.push_to_hub else None
    with output_at(a.out) as out:
        name = export_run(a.run, out, a.family, a.dtype, a.shard_bytes or SHARD_BYTES)
        if hub is not None:
            base = base_model_metadata(a.run, load_resolved(folder_of(a.run) / "config.yaml"))
            write_card(a.run, out, a.push_to_hub, a.license, base)
            print(f"uploaded {upload(hub, out, a.push_to_hub, a.public)}", flush=True)
    print(f"exported {a.out} as {name}")
    return 0
