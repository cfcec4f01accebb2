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
        default=0.1, gt=0, lt=1, description="Part of the characters to hold out"
    )


class DocumentsValidation(Settings):
    """Some documents of the training source, chosen by the hash of their text."""

    name: Literal["documents"] = "documents"
    fraction: float = Field(
        default=0.01, gt=0, lt=1, description="Part of the documents to hold out"
    )


class SourceValidation(Settings):
    """A separate source of validation text."""

    name: Literal["source"] = "source"
    source: Source = Field(description="Where the validation text comes from")


class NoValidation(Settings):
    """No validation split: all text is for training."""

    name: Literal["none"] = "none"


Validation = Annotated[
    TailValidation | DocumentsValidation | SourceValidation | NoValidation,
    Field(discriminator="name"),
]


class LocalCacheConfig(Settings):
    """Host-local cache of prepared data at a URL, shared by all processes of the host."""

    path: str | None = Field(
        default=None,
        description="Folder on a fast disk of the host; by default $JAXTRAIN_CACHE or "
        "~/.cache/jaxtrain",
    )
    max_bytes: int = Field(
        default=100_000_000_000,
        gt=0,
        description="Bytes of tokens that are kept there; those that were used longest ago go "
        "first",
    )


TrainSource = Annotated[Source | MixtureSource, Field(discriminator="name")]


class DataConfig(Settings):
    """Sources, tokenizer, packing, order and preparation of the training and validation data."""

    train: TrainSource = Field(
        default=TextSource(), description="Where the training text comes from"
    )
    stages: tuple[Stage, ...] = Field(
        default=(),
        description="Parts of the run, in order, with mixtures, sequence lengths and batch sizes "
        "of their own; the last goes on to the end",
    )
    length_ramp: LengthRamp | None = Field(
        default=None,
        description="Short rows first, doubled phase by phase; null: train.sequence_length always",
    )
    batch_ramp: BatchRamp | None = Field(
        default=None,
        description="Few rows a step first, doubled phase by phase; null: train.batch_size always",
    )
    validation: Validation = Field(default=TailValidation(), description="What text is held out")
    tokenizer: TokenizerConfig = Field(
        default=SentencePieceConfig(), description="How text becomes token ids"
    )
    packing: PackingConfig = Field(
        default=ConcatConfig(), description="How documents fill the rows of a batch"
    )
    shuffle: ShuffleConfig = Field(
        default=GlobalShuffle(), description="How far apart documents may come from that are mixed"
    )
    augment: AugmentConfig = Field(
        default=NoAugment(), description="How rows are changed at random while they are read"
    )
    seed: int = Field(default=0, ge=0, description="Decides the order of the training data")
    cache_dir: str | None = Field(
        default=None,
        description="Prepared data: a folder, or s3://, gs:// or another URL of fsspec, which is "
        "read through local_cache; by default $JAXTRAIN_CACHE or ~/.cache/jaxtrain",
    )
    local_cache: LocalCacheConfig = Field(
        default=LocalCacheConfig(), description="Where a host keeps blocks of a cache_dir at a URL"
    )
    prefetch: int = Field(
        default=4, gt=0, description="Batches that are read ahead of the training step"
    )
    workers: int = Field(
        default=1,
        ge=0,
        description="Threads that read batches ahead; 0 reads each when it is asked for",
    )

    prepare_workers: int | None = Field(
        default=None, gt=0, description="Processes that tokenize; by default one a core"
    )
    dedup_memory: float = Field(
        default=4.0,
        gt=0,
        description="GiB for the partitions in which filters look for duplicates, in work at once",
    )
    skip_damaged: bool = Field(
        default=False,
        description="Leave out the documents of damaged shards instead of stopping; reads all of "
        "the prepared data once at the start",
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
        held = self.validation.source.name if self.validation.name == "source" else names[0]
        if (held == "preference") != (names[0] == "preference"):
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
