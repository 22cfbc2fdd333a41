"""What every adapter reads off checkpoints before a server starts: configurations and the classifier."""

from __future__ import annotations

import logging
import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from c2t_plugin import json_text
from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME, ClassifierSpec, NodeClassifier, load_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.errors import ClassifierError, ConfigError, HubError

# Files that ship with the plugin, one folder per kind of draft.
CLASSIFIERS = Path(__file__).resolve().parent.parent / "classifiers"
SHIPPED_DRAFTS = {"eagle": "eagle1", "eagle3": "eagle3", "standalone": "draft", "mtp": "mtp"}


def fetch(repo: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a local checkpoint directory or of a hub repository; None if there is no such file.

    revision: of a hub repository, None is its main branch. Raises HubError where nobody can say whether there is one.
    """
    local = Path(repo)
    # os.path, here and below, since Path raises where a name is too long or a folder may not be searched
    if os.path.exists(local):
        return local / name if os.path.isfile(local / name) else None
    if not _is_hub_id(repo):
        raise ConfigError(f"{repo!r} is neither a directory here nor a hub id of the form owner/name")
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub import errors as hub

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ConfigError(
            f"{repo!r}{at} is neither a directory here nor a reachable hub repository: {_first_line(error)}"
        ) from error
    except (hub.EntryNotFoundError, OSError) as error:
        # what is not in the cache, while the hub is not there to ask, is a kind of entry that is not found
        answered = isinstance(error, hub.EntryNotFoundError) and not isinstance(error, hub.LocalEntryNotFoundError)
        if answered or try_to_load_from_cache(repo, name, revision=revision) is _CACHED_NO_EXIST:
            return None
        raise HubError(
            f"the hub was not reached, and its cache does not say whether {repo!r} has {name} ({_first_line(error)}): "
            "connect, or name local files"
        ) from error


def _is_hub_id(name: str) -> bool:
    return name.count("/") <= 1 and name[:1] not in "./~" and not name.endswith(".safetensors")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_config(checkpoint: str, revision: str | None = None) -> dict[str, Any]:
    """config.json of a checkpoint directory or hub repository. revision: see fetch."""
    path = fetch(checkpoint, "config.json", revision)
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


def classifier_kind(base: str, draft: str | None, target: str | None) -> str:
    """The kind of draft that a classifier is for. An MTP head, which the target carries, is drafted with as EAGLE
    on SGLang."""
    return "mtp" if base == "EAGLE" and draft in (None, target) else base.lower()


def find_classifier(
    config: C2TConfig, base: str, draft: str | None, *, revision: str | None = None, probabilities: bool = False
) -> tuple[Path, str]:
    """The classifier file to use, and where it came from: "named", "beside the draft" or "shipped, generic".

    base: eagle, eagle3, mtp or standalone. draft: the draft checkpoint, None if the target carries it. revision: the
    draft's, see fetch. probabilities: prefer a file whose confidences are that on chains.
    """
    names = (CALIBRATED_NAME, FILE_NAME) if probabilities else (FILE_NAME,)
    if config.classifier is not None:
        named = Path(config.classifier)
        if os.path.isfile(named):
            return named, "named"
        # in a directory that is here, what is not there is no hub id either
        on_hub = _is_hub_id(config.classifier) and len(named.parts) == 2 and not os.path.isdir(named.parent)
        pinned = revision if config.classifier == draft else None
        found = _first(config.classifier, names, pinned) if on_hub or os.path.isdir(named) else None
        if found is None:
            raise ClassifierError(
                f"classifier {config.classifier!r} is neither a file nor a directory or hub repository with {FILE_NAME}"
            )
        return found, "named"
    beside = _first(draft, names, revision) if draft is not None else None
    if beside is not None:
        return beside, "beside the draft"
    return shipped_classifier(base, names), "shipped, generic"


def _first(repo: str, names: Sequence[str], revision: str | None) -> Path | None:
    return next((path for name in names if (path := fetch(repo, name, revision)) is not None), None)


def warn_of_kind(logger: logging.Logger, path: Path, spec: ClassifierSpec, base: str) -> None:
    """Say if a classifier was fitted on another kind of draft than `base`. Outputs stay right."""
    kind, wanted = spec.pair.get("kind"), SHIPPED_DRAFTS[base]
    if kind not in (None, wanted):
        logger.warning("C2T: %s was fitted on %s drafts, these are %s: fit one on yours", path, kind, wanted)


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
