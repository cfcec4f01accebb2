"""States in files: the same update, exact resume, and no memory that holds them all."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from test_offload_parameters import SPECS
from tiny import (
    SAMPLES,
    assert_same_run,
    batch,
    begin_random,
    close,
    forget_end,
    make_spec,
    mesh_of,
    random_params,
    rows_of,
    run_overrides,
    same,
    weights_of,
)
