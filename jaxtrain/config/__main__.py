"""Print the JSON schema of the configuration, for editors."""

from jaxtrain.config import json_schema

print(json_schema(), end="")
