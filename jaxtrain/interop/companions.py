"""Files saved with the weights: tokenizer, chat template, generation config."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxtrain.data import Tokenizer, load_tokenizer
from jaxtrain.data.tokenizer.tokenizer import FILES, huggingface_tokenizer
from jaxtrain.interop.configs import Json
from jaxtrain.interop.tokenizer_json import bos_name, tokenizer_json, with_bos
from jaxtrain.settings import UserError, read_object
from jaxtrain.storage.disk import write_json, write_whole

FOLDER = "huggingface"  # inside model/: the auxiliary files of the original checkpoint
AUX_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class Prompting(NamedTuple):
    """Whether a prompt starts with BOS, and which tokens end an answer."""

    bos: bool  # a prompt starts with the BOS token
    stops: tuple[int, ...]  # stop tokens, BOS among them


def copy_files(source: Path, target: Path) -> None:
    """Copy the auxiliary files of a checkpoint folder, as far as they exist, to another folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in AUX_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def read_json(path: Path) -> Json:
    """The object in a JSON file; {} if the file does not exist."""
    return read_object(path) if path.is_file() else {}


def check_aux_files(folder: Path) -> None:
    """Raise UserError for an auxiliary JSON file that cannot be read, before the model is used."""
    for name in AUX_FILES:
        if name.endswith(".json"):
            read_json(folder / name)


def tokenizer_of(folder: Path, rows: int) -> Tokenizer:
    """The tokenizer of a checkpoint whose embedding has `rows` rows.

    Special tokens with ids beyond the embedding are dropped (Gemma 3 1B has image tokens there).
    """
    file = folder / FILES["huggingface"]
    if file.is_file():
        tree = read_object(file)
        added = tree.get("added_tokens") or []
        inside = [token for token in added if token["id"] < rows]
        model = file.read_bytes()
        if len(inside) < len(added):
            model = json.dumps(tree | {"added_tokens": inside}, ensure_ascii=False).encode()
        tokenizer = huggingface_tokenizer(model, str(file))
    elif (folder / FILES["sentencepiece"]).is_file():
        tokenizer = load_tokenizer(folder)
    else:
        raise UserError(f"{folder} has no tokenizer.json and no tokenizer.model")
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the embedding only "
            f"{rows} rows"
        )
    return tokenizer


def prompting(model_dir: Path, tokenizer: Tokenizer) -> Prompting:
    """BOS and stop tokens from the original checkpoint's files.

    Models without such files start with BOS and stop at BOS.
    """
    folder = model_dir / FOLDER
    stops, bos = {tokenizer.bos_id}, True
    if not folder.is_dir():
        return Prompting(bos, tuple(stops))
    for name in ("config.json", "generation_config.json"):
        stops |= set(_listed(read_json(folder / name).get("eos_token_id")))
    if tokenizer.name == "huggingface":
        bos = adds_bos(tokenizer.model, tokenizer.bos_id)
    return Prompting(bos, tuple(sorted(stops)))


def adds_bos(model: bytes, bos_id: int) -> bool:
    """Whether a tokenizer puts BOS in front of a text. model: content of its tokenizer.json."""
    inner = tokenizers.Tokenizer.from_str(model.decode())
    return inner.encode("a").ids[:1] == [bos_id]


def chat_template(model_dir: Path) -> str | None:
    """The Jinja chat template of the checkpoint that a model was made from."""
    return template_in(model_dir / FOLDER)


def template_in(folder: Path) -> str | None:
    """The Jinja chat template of a checkpoint; three files may hold it."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {one["name"]: one["template"] for one in template}
            template = named.get("default")
        if template:
            return template
    return None


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens that a checkpoint's chat template may use: bos_token, eos_token, ..."""
    found = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, token in read_json(folder / name).items():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def chat_files(template: str, special: dict[str, str], end: int, out: Path) -> None:
    """Write the chat template used in training, and the end-of-answer token, into an exported
    checkpoint."""
    write_whole(out / "chat_template.jinja", template)
    settings = read_json(out / "tokenizer_config.json")
    settings.pop("chat_template", None)
    write_json(out / "tokenizer_config.json", settings | special)
    generation = read_json(out / "generation_config.json")
    ends = {end, *_listed(generation.get("eos_token_id"))}
    write_json(out / "generation_config.json", generation | {"eos_token_id": sorted(ends)})


def tokenizer_files(tokenizer: Tokenizer, model_dir: Path, out: Path) -> None:
    """Write the tokenizer files of transformers, and the original checkpoint's auxiliary files.

    Raises UserError, before anything is written, if the tokenizer cannot be a tokenizer.json.
    """
    text, bos = tokenizer_json(tokenizer), bos_name(tokenizer)
    settings = read_json(model_dir / FOLDER / "tokenizer_config.json")
    if not settings:
        settings = {"bos_token": bos, "eos_token": bos}
        settings |= {"clean_up_tokenization_spaces": False}  # older versions default to True
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    elif tokenizer.name == "sentencepiece":
        # LlamaTokenizer would replace the pipeline of tokenizer.json by its own.
        if settings.get("add_bos_token", True):
            text = with_bos(text, bos, tokenizer.bos_id)
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    copy_files(model_dir / FOLDER, out)
    (out / "config.json").unlink(missing_ok=True)
    write_whole(out / "tokenizer.json", text)
    write_json(out / "tokenizer_config.json", settings)
    if not (out / "generation_config.json").is_file():
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.bos_id}
        write_json(out / "generation_config.json", ids)


def _listed(ids: Any) -> list[int]:
    """A list of token ids from a single id, a list or None."""
    return [int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
