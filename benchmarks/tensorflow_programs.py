"""OG-MARL's TensorFlow programs, imported without what their environments and data need."""

import importlib
import sys
from typing import Any
from unittest.mock import MagicMock

SYSTEMS = {"maicq": "MAICQSystem", "qmix_cql": "QMIXCQLSystem", "iql_cql": "IQLCQLSystem"}

QUIET = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables of a process with TensorFlow."""

ABSENT = (
    "chex",
    "hydra",
    "jax",
    "omegaconf",
    "og_marl.environments",
    "og_marl.loggers",
    "og_marl.replay_buffers",
    "og_marl.vault_utils",
    "og_marl.vault_utils.download_vault",
    "og_marl.wrapped_environments",
    "og_marl.wrapped_environments.base",
)


def load_module(program: str, checkout: str) -> Any:
    """Import a program of OG-MARL, without what its environments and data need."""
    sys.path.insert(0, checkout)
    sys.modules.update({name: MagicMock() for name in ABSENT})
    return importlib.import_module(f"og_marl.baselines.tf2_systems.offline.{program}")
