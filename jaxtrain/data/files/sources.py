"""Text sources: their configuration, and the files that they name."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxtrain.data.files.local import (
    File,
    files_at,
    files_like,
    files_under,
    fixed_part,
    is_folder,
    local_path,
    without_copies,
)
from jaxtrain.data.files.remote import HTTP, filesystem_of, revision_of
from jaxtrain.data.filters import Filter
from jaxtrain.settings import Settings, UserError
from jaxtrain.storage.objects import is_local, retried

SAMPLE_BY = (
    "key of a non-negative number: documents are sampled with a probability proportional to it. "
    "null: each once per epoch. Needs packing best_fit or padded"
)
SHAKESPEARE = Path(__file__).parents[1] / "tinyshakespeare.txt"
HASH_ALWAYS_BELOW = 1 << 24  # bytes; larger files are hashed again only if size or time changed
PATH = (
    "a file, a folder, a glob such as data/*.gz, or a URL: hf://datasets/OWNER/NAME/*.parquet "
    "(OWNER/NAME@REVISION for a branch, tag or commit), s3://, gs://, https://. {000..012} expands "
    "to all of these numbers"
)

CODE = (
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .cu .cuh .rs .go .java .kt .scala .swift .js .jsx "
    ".ts .tsx .rb .php .pl .lua .jl .r .m .sh .sql .hs .ml .ex .erl .clj .lisp .f90 .cs .zig .nim "
    ".dart .proto .cmake .toml .yaml .md .rst .tex"
)


class Filtered(Settings):
    """A source whose documents may be filtered before they are tokenized."""

    filters: tuple[Filter, ...] = Field(
        default=(),
        description="filters of documents, applied in order, each to the documents that the "
        "previous ones kept",
    )


class TextSource(Filtered):
    """Plain UTF-8 text; .gz, .xz and .zst files are decompressed while they are read."""

    sample_by: ClassVar[str | None] = None  # plain text has no field to sample by
    name: Literal["text"] = "text"
    path: str = Field(
        default="tinyshakespeare", description=PATH + "; the bare name tinyshakespeare is built in"
    )
    document: Literal["file", "line", "paragraph"] = Field(
        default="file",
        description="unit of a document: a file, a line, or the text between blank lines",
    )

    @model_validator(mode="after")
    def _is_text(self) -> "TextSource":
        if other := re.search(r"\.(jsonl|ndjson|parquet)(\.(gz|xz|zst))?$", self.path.lower()):
            name = "parquet" if other[1] == "parquet" else "jsonl"
            raise ValueError(
                f"{self.path} is not plain text: set name={name}, and perhaps its field"
            )
        return self


class JsonlSource(Filtered):
    """One JSON object per line; .gz, .xz and .zst files are decompressed while they are read."""

    name: Literal["jsonl"] = "jsonl"
    path: str = Field(description=PATH)
    field: str = Field(default="text", description="key of a document's text")
    sample_by: str | None = Field(default=None, description=SAMPLE_BY)


class ParquetSource(Filtered):
    """Parquet files with a column of text."""

    name: Literal["parquet"] = "parquet"
    path: str = Field(description=PATH)
    column: str = Field(default="text", description="column of a document's text")
    sample_by: str | None = Field(default=None, description=SAMPLE_BY)


class CodeSource(Filtered):
    """Folders of source code, one document per file; binaries and third-party code are left out.

    Folders without code of their own (.git, node_modules, vendor, build, ...) are skipped.
    """

    sample_by: ClassVar[str | None] = None
    name: Literal["code"] = "code"
    path: str = Field(description=PATH)
    suffixes: tuple[str, ...] = Field(
        default=tuple(CODE.split()),
        description="file name endings that are read",
    )
    max_bytes: int = Field(
        default=1 << 20,
        gt=0,
        description="files larger than this are skipped as generated code, in bytes",
    )
    header: str | None = Field(
        default=None, description="first line of each document, such as '# {path}'; null: none"
    )


class ChatTemplateSource(Settings):
    """JSON records rendered as text by a chat template; all tokens count in the loss. A .json file
    may hold them as one array."""

    filters: ClassVar[tuple[Filter, ...]] = ()  # filters work on text, not on JSON of messages
    sample_by: ClassVar[str | None] = None
    path: str = Field(description=PATH)
    template: str | None = Field(
        default=None,
        description="Jinja template, or a file that holds it. Default that of train.init_from, "
        "else a plain one with ### before each role",
    )
    special: dict[str, str] = Field(
        default_factory=dict,
        description="special tokens that the template uses, such as {eos_token: </s>}; default "
        "those of train.init_from, else BOS for both ends",
    )
    refused: Literal["error", "drop"] = Field(
        default="error",
        description="records that the template rejects (a system message, tool_calls, roles that "
        "do not alternate) stop the preparation, or are dropped and counted",
    )


class ChatSource(ChatTemplateSource):
    """Conversations, one JSON object per line; only the assistant's tokens count in the loss.
    Formats: messages; ShareGPT's conversations; Alpaca's instruction, input, output, history;
    Dolly's instruction, context, response; prompt and completion, strings or messages. The fields
    system and tools are optional. A message with weight 0 or train false is masked in the loss."""

    name: Literal["chat"] = "chat"
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate",
        description="a conversation longer than train.sequence_length is truncated at its end, or "
        "dropped; it is also dropped if truncation would leave no answer tokens",
    )


class PreferenceSource(ChatTemplateSource):
    """Preference pairs or labelled answers, one JSON object per line, for `objective`.

    Formats: prompt, chosen and rejected; chosen and rejected with the prompt in them; prompt,
    completion and label. Each text is a string, which becomes one message, or a list of messages.
    """

    name: Literal["preference"] = "preference"
    too_long: Literal["truncate", "drop"] = Field(
        default="drop",
        description="a pair longer than train.sequence_length tokens is dropped, or its longer "
        "answer is truncated (both if need be)",
    )


CHAT_TEMPLATE_SOURCES = ("chat", "preference")  # sources rendered by a chat template
Source = Annotated[
    TextSource | JsonlSource | ParquetSource | CodeSource | ChatSource | PreferenceSource,
    Field(discriminator="name"),
]
COMPRESSED = (".gz", ".xz", ".zst")
SUFFIXES = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "chat": (".jsonl", ".ndjson", ".json"),
    "preference": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
}
FOREIGN = (
    ".git .hg .svn .tox .nox .venv venv env __pycache__ node_modules bower_components "
    "site-packages vendor vendored third_party thirdparty external deps dist build target out "
    ".cache .idea .mypy_cache .pytest_cache .ruff_cache .eggs Pods"
)
NOT_ENTERED = frozenset(FOREIGN.split())
PATTERN = re.compile(r"[*?\[]")
GENERATED = re.compile(r"(\.min\.(js|css)|[-.]bundle\.js|_pb2(_grpc)?\.py|\.pb\.(go|cc|h))$")


def source_path(source: Source) -> str:
    """The path of a source, with the built-in one spelled out."""
    built_in = source.name == "text" and source.path == "tinyshakespeare"
    return str(SHAKESPEARE) if built_in else source.path


def field_of(source: Source) -> str:
    """JSONL key that a document's text is written under."""
    if source.name == "parquet":
        return source.column
    return source.field if source.name == "jsonl" else "text"


def content_hash(source: Source, cache_dir: Path) -> str:
    """SHA-256 over the contents of the files of `source`; a remote file counts by its version tag.

    The hashes of large local files are remembered in `cache_dir` by path, size and time.
    """
    total = hashlib.sha256()
    for file in find_files(source):
        if is_local(file.url):
            total.update(_file_hash(Path(file.url), cache_dir / "hashes").encode())
        else:
            total.update(f"{file.url} {file.size} {file.version}".encode())
        if source.name == "code" and source.header:
            total.update(file.name.encode())
    return total.hexdigest()


def find_files(source: Source) -> list[File]:
    """Return the files of `source`, sorted by path; each once, even if links lead to it too.

    Raises UserError if there is none.
    """
    found = [file for url in _spelled_out(source_path(source)) for file in _found(source, url)]
    files = {file.url: file for file in found}
    far = {url for url in files if not is_local(url)}
    return [files[url] for url in sorted([*far, *without_copies(files.keys() - far)])]


def revisions_of(sources: Iterable[Source]) -> dict[str, str]:
    """Commits of the Hugging Face repositories that sources are read from, by repository URL."""
    urls = (_spelled_out(source_path(source))[0] for source in sources)
    return dict(found for url in urls if (found := revision_of(url)))


def _found(source: Source, url: str) -> list[File]:
    files = (_found_here if is_local(url) else _found_far)(source, url)
    if source.name == "code":
        files = [file for file in files if _is_own_code(source, file)]
        what = f"{url} has no source code of its own that ends in {' '.join(source.suffixes)}"
    elif PATTERN.search(url):
        what = f"no file matches {url}"
    else:
        what = f"the folder {url} has no file that ends in {', '.join(_endings(source))}"
    if not files:
        raise UserError(what)
    return files


def _found_here(source: Source, url: str) -> list[File]:
    path, code = local_path(url), source.name == "code"
    root = path
    if PATTERN.search(path) and not os.path.lexists(path):
        root, entries = fixed_part(path), files_like(path, strict=not code)
    elif is_folder(path):
        skipped = NOT_ENTERED if code else ()
        entries = files_under(path, _endings(source), not_entered=skipped, strict=not code)
    else:
        root, entries = os.path.dirname(path), files_at([path])
        if not entries:
            raise UserError(f"{url} is neither a file nor a folder")
    return [one._replace(name=one.url.removeprefix(root).lstrip("/")) for one in entries]


def _found_far(source: Source, url: str) -> list[File]:
    filesystem, path = filesystem_of(url)
    pattern = filesystem.protocol != HTTP and PATTERN.search(path)
    if pattern and not retried(url, lambda: filesystem.exists(path)):
        glob = lambda pattern: retried(url, lambda: filesystem.glob(pattern, detail=True))
        literal = path.replace("[", "[[]")  # a name may have brackets
        listing = ("[" in path and glob(literal)) or glob(path)
        root = re.split(r"[^/]*[*?\[]", path)[0]
    elif (info := retried(url, lambda: filesystem.info(path)))["type"] == "directory":
        found, root = retried(url, lambda: filesystem.find(path, detail=True)), path
        endings = _endings(source)
        listing = {p: info for p, info in found.items() if p.lower().endswith(endings)}
    else:
        listing, root = {path: info}, str(PurePosixPath(path).parent)
    files = {p: info for p, info in listing.items() if info["type"] == "file"}
    return [_file_far(filesystem, p, root, info) for p, info in files.items()]


def _file_far(filesystem: Any, path: str, root: str, info: dict[str, Any]) -> File:
    version = next((info[k] for k in ("version", "ETag", "etag", "md5Hash") if info.get(k)), "")
    version = version or info.get("blob_id") or info.get("LastModified") or info.get("mtime") or ""
    url = filesystem.unstrip_protocol(path)
    return File(url, info.get("size"), str(version), path.removeprefix(root).lstrip("/"))


def _endings(source: Source) -> tuple[str, ...]:
    if source.name == "code":
        return source.suffixes
    endings = SUFFIXES[source.name]
    if source.name == "parquet":
        return endings
    return endings + tuple(ending + c for ending in endings for c in COMPRESSED)


def _is_own_code(source: CodeSource, file: File) -> bool:
    name = PurePosixPath(file.name)
    return (
        name.suffix.lower() in source.suffixes
        and NOT_ENTERED.isdisjoint(name.parts[:-1])
        and not GENERATED.search(name.name)
        and (file.size or 0) <= source.max_bytes
    )


def _spelled_out(url: str) -> list[str]:
    """Expand `a{08..10}` to a08, a09, a10: shards of a web server, which cannot list its files."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", url)
    if not match:
        return [url]
    first, last = match.groups()
    numbers = (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
    return [
        one for i in numbers for one in _spelled_out(url[: match.start()] + i + url[match.end() :])
    ]


def _file_hash(path: Path, cache_dir: Path) -> str:
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    note = cache_dir / hashlib.sha256(identity.encode()).hexdigest()
    if stat.st_size >= HASH_ALWAYS_BELOW and note.exists():
        return note.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size >= HASH_ALWAYS_BELOW:
        cache_dir.mkdir(parents=True, exist_ok=True)
        note.write_text(digest)
    return digest
