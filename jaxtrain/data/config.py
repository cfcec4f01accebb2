"""The `data` section of the configuration."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from jaxtrain.data.batches.augment import AugmentConfig, NoAugment
from jaxtrain.data.batches.mixture import (
    MixtureSource,
    Stage,
    check_data_stages,
    sources_of,
    weights_of,
)
from jaxtrain.data.batches.order import GlobalShuffle, ShuffleConfig
from jaxtrain.data.batches.packing import ConcatConfig, PackingConfig
from jaxtrain.data.batches.ramps import BatchRamp, LengthRamp
from jaxtrain.data.files.sources import ChatTemplateSource, Source, TextSource
from jaxtrain.data.tokenizer.tokenizer import SentencePieceConfig, TokenizerConfig
from jaxtrain.settings import Settings
from jaxtrain.storage.location import location_fault


class TailValidation(Settings):
    """The end of a single text file, as in nanoGPT."""

    name: Literal["tail"] = "tail"
    fraction: float = Field(
        default=0.1, gt=0, lt=1, description="fraction of the characters to hold out"
    )


class DocumentsValidation(Settings):
    """Random documents of the training source, chosen by the hash of their text."""

    name: Literal["documents"] = "documents"
    fraction: float = Field(
        default=0.01, gt=0, lt=1, description="fraction of the documents to hold out"
    )


class SourceValidation(Settings):
    """A separate source of validation text."""

    name: Literal["source"] = "source"
    source: Source = Field(description="source of the validation text")


class NoValidation(Settings):
    """No validation split: all data is for training."""

    name: Literal["none"] = "none"


Validation = Annotated[
    TailValidation | DocumentsValidation | SourceValidation | NoValidation,
    Field(discriminator="name"),
]


class LocalCacheConfig(Settings):
    """Host-local cache of prepared data at a URL, shared by all processes of the host."""

    path: str | None = Field(
        default=None,
        description="folder on a fast disk of the host; default $JAXTRAIN_CACHE or "
        "~/.cache/jaxtrain",
    )
    max_bytes: int = Field(
        default=100_000_000_000,
        gt=0,
        description="size limit in bytes; the least recently used token blocks are removed first",
    )


TrainSource = Annotated[Source | MixtureSource, Field(discriminator="name")]


class DataConfig(Settings):
    """Sources, tokenizer, packing, order and preparation of the training and validation data."""

    train: TrainSource = Field(default=TextSource(), description="source of the training data")
    stages: tuple[Stage, ...] = Field(
        default=(),
        description="stages of the run, in order, each with its own mixture, sequence length and "
        "batch size. The last one continues to the end",
    )
    length_ramp: LengthRamp | None = Field(
        default=None,
        description="sequence length warm-up: short sequences first, doubled phase by phase; "
        "null: always train.sequence_length",
    )
    batch_ramp: BatchRamp | None = Field(
        default=None,
        description="batch size warm-up: few sequences per step first, doubled phase by phase; "
        "null: always train.batch_size",
    )
    validation: Validation = Field(default=TailValidation(), description="held-out validation data")
    tokenizer: TokenizerConfig = Field(
        default=SentencePieceConfig(),
        description="tokenizer, trained on the data or loaded from a file",
    )
    packing: PackingConfig = Field(
        default=ConcatConfig(), description="packing of documents into the sequences of a batch"
    )
    shuffle: ShuffleConfig = Field(
        default=GlobalShuffle(),
        description="shuffling: of all documents, or of nearby blocks for data too large for "
        "the disk",
    )
    augment: AugmentConfig = Field(
        default=NoAugment(), description="random changes of the token sequences when they are read"
    )
    seed: int = Field(default=0, ge=0, description="seed of the order of the training data")
    cache_dir: str | None = Field(
        default=None,
        description="folder of prepared data: a path, or s3://, gs:// or another URL of fsspec, "
        "read through local_cache. Default $JAXTRAIN_CACHE or ~/.cache/jaxtrain",
    )
    local_cache: LocalCacheConfig = Field(
        default=LocalCacheConfig(),
        description="cache on each host for blocks of a cache_dir at a URL",
    )
    prefetch: int = Field(
        default=4, gt=0, description="batches that are read ahead of the training step"
    )
    workers: int = Field(
        default=1,
        ge=0,
        description="threads that read batches ahead; 0: each batch is read when it is needed",
    )

    prepare_workers: int | None = Field(
        default=None, gt=0, description="tokenizer processes; default one per core"
    )
    dedup_memory: float = Field(
        default=4.0,
        gt=0,
        description="memory limit in GiB for the partitions that duplicate filters process at once",
    )
    skip_damaged: bool = Field(
        default=False,
        description="skip documents of damaged shards instead of stopping. All prepared data is "
        "read once at the start",
    )

    @field_validator("cache_dir")
    @classmethod
    def _can_be_written(cls, cache_dir: str | None) -> str | None:
        if why := location_fault(cache_dir or ""):
            raise ValueError(why)
        return cache_dir

    @model_validator(mode="after")
    def _stages_and_sources_agree(self) -> "DataConfig":
        weights = weights_of(self.train)
        check_data_stages(self.stages, list(weights), list(weights.values()))
        if self.packing.name == "concat":
            for name, source in sources_of(self.train).items():
                if source.sample_by is not None:
                    raise ValueError(
                        f"sample_by of the source {name} draws whole documents: set "
                        "packing.name: best_fit"
                    )
        sources = list(sources_of(self.train).values())
        names = [source.name for source in sources]
        talk = any(isinstance(source, ChatTemplateSource) for source in sources)
        if talk and self.packing.name != "padded":
            raise ValueError("conversations are not cut or concatenated: set packing.name: padded")
        if "preference" in names and set(names) != {"preference"}:
            raise ValueError("preferences are not mixed with other sources")
        staged = self.stages or self.length_ramp or self.batch_ramp
        if "preference" in names and (staged or self.augment.name != "none"):
            raise ValueError("preferences have one stage and are not augmented")
        validation_source = (
            self.validation.source.name if self.validation.name == "source" else names[0]
        )
        if (validation_source == "preference") != (names[0] == "preference"):
            raise ValueError(
                "preferences need preferences as data.validation, and other text needs other text"
            )
        texts = [self.train, *sources]
        if self.validation.name == "tail" and any(text.filters for text in texts):
            raise ValueError(
                "data.train.filters leave documents, not a file with an end: set "
                "data.validation.name=documents"
            )
        if self.skip_damaged and "://" in (self.cache_dir or ""):
            raise ValueError(
                "skip_damaged leaves out shards of a folder: delete a damaged store at a URL to "
                "have it prepared again"
            )
        return self
