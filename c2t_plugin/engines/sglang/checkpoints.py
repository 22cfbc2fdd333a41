"""What is read off checkpoints before a server starts, in no process that serves: the draft's kind, whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from c2t_plugin.engines.checkpoints import read_config
from c2t_plugin.engines.sglang.args import draft_revision
from c2t_plugin.errors import ConfigError

# SGLang's srt/arg_groups/model_overrides switches multi-layer EAGLE on for these.
_MULTI_LAYER = ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "GigaChat35ForCausalLM")


def _config_of_target(server_args: Any) -> dict[str, Any]:
    return read_config(server_args.model_path, getattr(server_args, "revision", None))


def detect_base(draft: str | None, target: str | None = None, revision: str | None = None) -> str:
    """EAGLE, EAGLE3 or STANDALONE by the draft checkpoint's architecture; EAGLE if the target carries its draft."""
    if draft is None or draft == target:
        return "EAGLE"
    architectures = _architectures(read_config(draft, revision), draft)
    name = architectures[0].lower() if architectures else ""
    if not name:
        raise ConfigError(f"{draft} names no architecture in config.json; set --speculative-c2t-base")
    if "eagle3" in name:
        return "EAGLE3"
    if any(mark in name for mark in ("eagle", "nextn", "mtp")):
        return "EAGLE"
    return "STANDALONE"


def _architectures(config: Mapping[str, Any], checkpoint: str) -> list[str]:
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{checkpoint} has architectures in config.json that are no list of names")
    return found


def check_draft_loop(server_args: Any, base: str) -> None:
    """SGLang drafts with some targets' own heads layer after layer, but finds them by the name EAGLE alone."""
    if base != "EAGLE":
        return
    for architecture in _architectures(_config_of_target(server_args), server_args.model_path):
        if architecture in _MULTI_LAYER:
            raise ConfigError(
                f"{server_args.model_path} is a {architecture}, whose heads SGLang drafts with in another loop "
                "(multi-layer EAGLE), which C2T does not score: serve it without C2T"
            )


def check_vocabulary(server_args: Any, base: str) -> None:
    """A stand-alone draft must use the target's tokens."""
    if base != "STANDALONE":
        return
    draft = server_args.speculative_draft_model_path
    if draft is None:
        raise ConfigError("a stand-alone draft needs --speculative-draft-model-path")
    configs = (read_config(draft, draft_revision(server_args)), _config_of_target(server_args))
    found, expected = (config.get("vocab_size") for config in configs)
    if None not in (found, expected) and found != expected:
        raise ConfigError(
            f"the draft {draft} has a vocabulary of {found}, the target {server_args.model_path} of {expected}; "
            "a stand-alone draft must share the target's: use another draft"
        )
