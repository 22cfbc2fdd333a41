"""Whether rows are of the classifiers and weights that ship now."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from benchmarks.pairs.smollm2.ship import WEIGHTS
from benchmarks.pairs.toy import SHIPPED
from c2t_plugin.classifier import load_classifier
from c2t_plugin.lab.pair_files import file_hash

# These read no pair: arithmetic on what is printed, and trees of no model.
WITHOUT_PAIR = frozenset(
    {"c2t-v2-lemmas", "c2t-v2-equations", "c2t-v2-arithmetic", "dyspec-overhead", "dyspec-table-5"}
)
# The real pair's head is written out of the repository's file; its classifiers lie beside that.
REAL_DRAFT = "eagle3"
UNNAMED = "Made before rows named the files that they are of; the classifiers may have changed since."


@lru_cache(maxsize=2)
def shipped(real: bool = False) -> Mapping[str, str]:
    """Hashes by name, as rows have them: of every classifier's file, and of the weights that it was fitted on."""
    folders = (
        {REAL_DRAFT: WEIGHTS} if real else {path.name: path for path in sorted(SHIPPED.iterdir()) if path.is_dir()}
    )
    found: dict[str, str] = {}
    for draft, folder in folders.items():
        for path in sorted(folder.glob("c2t_classifier*.safetensors")):
            found[f"{draft}/{path.name}"] = file_hash(path)
            pair = load_classifier(path).spec.pair
            found |= {name: pair[part].rpartition(":")[2] for name, part in ((draft, "draft"), ("target", "target"))}
    return found


def older(files: Mapping[str, str], real: bool = False) -> list[str]:
    """Names of the files that rows were made with and that are others now, or that there are no more.

    Two are no sign of age: the small target is trained on demand, and the real head's LM head is a product that is
    computed where it is prepared, whose last bits are the processor's. Its classifiers name what it is.
    """
    now = shipped(real)
    changed = (name for name, hashed in files.items() if now.get(name) != hashed)
    return sorted(name for name in changed if not (name.startswith("small-") or (real and name == REAL_DRAFT)))


def remark(record: Mapping[str, Any], real: bool = False) -> str:
    """What a page has to say of a record's age, empty if it is of what ships."""
    if record["experiment"] in WITHOUT_PAIR:
        return ""
    if "files" not in record:
        return UNNAMED
    changed = older(record["files"], real)
    return f"Older than what ships now: {', '.join(changed)}." if changed else ""
