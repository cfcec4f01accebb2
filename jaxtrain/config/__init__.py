"""The configuration: its tree of sections, loading, and values derived from the depth dial.

Each section's model is in `config.py` of the folder of the code that it configures.
`python -m jaxtrain.config > configs/schema.json` writes the schema for editors.
"""

from jaxtrain.config.fields import fields, tag_of, variants_of
from jaxtrain.config.load import (
    find_config,
    json_schema,
    load_config,
    save_yaml,
    shipped_names,
    to_yaml,
    validate,
)  # fmt: skip
from jaxtrain.config.tree import Config, Sections

__all__ = [
    "Config", "Sections", "fields", "find_config", "json_schema", "load_config", "save_yaml",
    "shipped_names", "tag_of", "to_yaml", "validate", "variants_of",
]  # fmt: skip
