"""What every adapter reads off checkpoints before a server starts: configurations and the classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from c2t_plugin import json_text
from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME, NodeClassifier, load_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.errors import ClassifierError, ConfigError

# Files that ship with the plugin, one folder per kind of draft.
CLASSIFIERS = Path(__file__).resolve().parent.parent / "classifiers"
SHIPPED_DRAFTS = {"eagle": "eagle1", "eagle3": "eagle3", "standalone": "draft", "mtp": "mtp"}


def fetch(repo: str, name: str) -> Path | None:
    """A file of a local checkpoint directory or of a hub repository; None if there is no such file."""
    local = Path(repo)
    if local.exists():
        return local / name if (local / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(repo, name))
    except EntryNotFoundError:
        return None
    except (RepositoryNotFoundError, HFValidationError, OfflineModeIsEnabled) as error:
        raise ConfigError(f"{repo!r} is neither a directory here nor a reachable hub repository: {error}") from error


def read_config(checkpoint: str) -> dict[str, Any]:
    """config.json of a checkpoint directory or hub repository."""
    path = fetch(checkpoint, "config.json")
    if path is None:
        raise ConfigError(f"{checkpoint} has no config.json; name a checkpoint directory or hub id")
    # engines read a name that comes twice, and so do we
    config = json_text.load(path, ConfigError, once=False)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def shipped_classifier(base: str, names: Sequence[str] = (FILE_NAME,)) -> Path:
    """The classifier fitted on the project's own pair for this kind of draft: eagle, eagle3, mtp or standalone.

    names: of files, the first that there is.
    """
    if base not in SHIPPED_DRAFTS:
        raise ClassifierError(f"no classifier ships for {base} drafts; fit one (c2t collect, c2t fit) and name it")
    return next(path for name in names if (path := CLASSIFIERS / SHIPPED_DRAFTS[base] / name).is_file())


def find_classifier(
    config: C2TConfig, base: str, draft: str | None, *, probabilities: bool = False
) -> tuple[Path, str]:
    """The classifier file to use, and where it came from: "named", "beside the draft" or "shipped, generic".

    base: eagle, eagle3, mtp or standalone. draft: the draft checkpoint, None if the target carries it. probabilities:
    prefer a file whose confidences are that on chains.
    """
    names = (CALIBRATED_NAME, FILE_NAME) if probabilities else (FILE_NAME,)
    if config.classifier is not None:
        named = Path(config.classifier)
        if named.is_file():
            return named, "named"
        holds = named.is_dir() or _looks_like_hub_id(config.classifier)
        found = _first(config.classifier, names) if holds else None
        if found is None:
            raise ClassifierError(
                f"classifier {config.classifier!r} is neither a file nor a directory or hub repository with {FILE_NAME}"
            )
        return found, "named"
    beside = _first(draft, names) if draft is not None else None
    if beside is not None:
        return beside, "beside the draft"
    return shipped_classifier(base, names), "shipped, generic"


def _first(repo: str, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := fetch(repo, name)) is not None), None)


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".safetensors")


def load_fitting_classifier(path: Path, config: C2TConfig) -> NodeClassifier:
    """Load a classifier and check it against the options."""
    classifier = load_classifier(path)
    if config.top_m is not None and config.top_m != classifier.spec.top_m:
        raise ConfigError(
            f"top_m is {config.top_m}, but {path} was fitted with {classifier.spec.top_m}; leave it out or fit another"
        )
    # a classifier that is too wide is refused here, not by each worker
    classifier.network("cpu")
    return classifier
