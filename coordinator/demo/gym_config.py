"""Runs inside NeMo Gym's environment: resolves a configuration as Gym does, and says where its servers' folders are.

    <gym python> gym_config.py < config.json     ->  {"parent_dir": "...", "config": "<resolved YAML>"}

A script of its own, since NeMo Gym needs another Python than we do. It imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    """Reads JSON from standard input, prints one JSON line."""
    omegaconf: Any = importlib.import_module("omegaconf").OmegaConf
    parser: Any = importlib.import_module("nemo_gym.global_config").GlobalConfigDictParser()
    resolved = parser.parse_no_environment(omegaconf.create(json.load(sys.stdin)))
    parent_dir = str(importlib.import_module("nemo_gym").PARENT_DIR)
    print(json.dumps({"parent_dir": parent_dir, "config": omegaconf.to_yaml(resolved)}))


if __name__ == "__main__":
    main()
