"""What a trainer reads of the settings file. Apart, so that a client which does not ask for it loads neither YAML nor pydantic."""

from __future__ import annotations

import os
from collections.abc import Mapping

from coordinator.settings import AutosaveSettings, load_autosave


def autosave_settings(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> AutosaveSettings:
    """The section `autosave`. Raises INVALID_ARGUMENT naming the setting, where it came from, and what was probably meant."""
    return load_autosave(path, environ)
