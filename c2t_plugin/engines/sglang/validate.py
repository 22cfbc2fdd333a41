"""What is decided and refused before a server starts: base, draft length, classifier, flags that do not fit C2T."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from typing import Any

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import MASKED, PACKING, TREE_ATTENTION, C2TConfig
from c2t_plugin.engines import learned, learning
from c2t_plugin.engines.checkpoints import classifier_kind, find_classifier, load_fitting_classifier
from c2t_plugin.engines.contract import engine_version
from c2t_plugin.engines.served_traces import check_directory
from c2t_plugin.engines.sglang import args, checkpoints, startup, tree_options, unplugged
from c2t_plugin.engines.sglang.contract import check
from c2t_plugin.engines.sglang.patches import PATCHES
from c2t_plugin.errors import C2TError, ConfigError

# Draft steps when --speculative-num-steps is not given: deep enough for the classifier to choose, cheap enough to drop.
DEFAULT_STEPS = 6

# Where SGLang 0.5.23 is in the way, and what would change that.
_LORA = "SGLang serves LoRA with its built-in speculative algorithms only (arg_groups/lora_hook.py:253 of 0.5.23)"

# Field of the argument record, when it is in the way, flag to name, why.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "speculative_use_rejection_sampling",
        bool,
        "--speculative-use-rejection-sampling",
        "cutting a sampled draft at a token of low confidence would bias the output",
    ),
    (
        "speculative_use_block_verification",
        bool,
        "--speculative-use-block-verification",
        "it verifies sampled drafts, whose cut would bias the output",
    ),
    ("speculative_adaptive", bool, "--speculative-adaptive", "it changes the draft length that C2T cuts"),
    ("enable_multi_layer_eagle", bool, "--enable-multi-layer-eagle", "its worker drafts in another loop"),
    ("enable_lora", bool, "--enable-lora", _LORA),
    ("lora_paths", bool, "--lora-paths", _LORA),
    ("pp_size", lambda size: (size or 1) > 1, "--pp-size above 1", "stages would need the cut relayed"),
    (
        "enable_two_batch_overlap",
        bool,
        "--enable-two-batch-overlap",
        "the seeds of half batches are not relayed, and SGLang splits verification by one width "
        "(batch_overlap/two_batch_overlap.py:72 of 0.5.23)",
    ),
    ("enable_pdmux", bool, "--enable-pdmux", "the order of prefill and decode steps is not the one C2T relies on"),
    (
        "enable_attn_tp_input_scattered",
        bool,
        "--enable-attn-tp-input-scattered",
        "SGLang keeps it away from EAGLE-3 by that algorithm's own name alone",
    ),
    ("watermark_config", bool, "--watermark-config", "SGLang supports it for its built-in algorithms only"),
    ("enable_unified_memory", bool, "--enable-unified-memory", "SGLang supports it for its built-in algorithms only"),
)

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def validate(server_args: Any) -> None:
    """SGLang's hook while it resolves arguments: check, and write the resolved algorithm, draft length and width.

    Raises C2TError for an embedding program. For a command line it ends the process with one line instead.
    """
    try:
        _resolve(server_args)
    except C2TError as error:
        if args.flags_of(server_args) is None:
            raise
        raise SystemExit(f"C2T: {error}") from error


def _resolve(server_args: Any) -> None:
    check(engine_version("sglang"))
    PATCHES.require()
    config = args.config_of(server_args)
    base = _base(server_args, config)
    _refuse(server_args)
    _check_disaggregation(server_args, base, config)
    _check_dp_attention(server_args, base, config)
    unplugged.reach(server_args)
    checkpoints.check_vocabulary(server_args, base)
    checkpoints.check_draft_loop(server_args, base)
    draft = server_args.speculative_draft_model_path
    kind = classifier_kind(base, draft, server_args.model_path)
    revision = args.draft_revision(server_args)
    path, _ = find_classifier(config, kind, draft, revision=revision, probabilities=config.plans_chains)
    classifier = load_fitting_classifier(path, config)
    check_directory(config)
    _check_curve(config)
    _check_learned(server_args, base, config, classifier)
    _check_packing(server_args, config)
    _check_prefill_graphs(server_args, config)
    server_args.speculative_algorithm = f"C2T_{base}"
    _shape(server_args, config)


def _base(server_args: Any, config: C2TConfig) -> str:
    named = str(server_args.speculative_algorithm).upper().removeprefix("C2T").removeprefix("_")
    chosen = "" if config.base == "auto" else config.base.upper()
    if named and chosen and named != chosen:
        raise ConfigError(f"algorithm C2T_{named} contradicts --speculative-c2t-base {config.base}; give one of them")
    return (
        named
        or chosen
        or checkpoints.detect_base(
            server_args.speculative_draft_model_path, server_args.model_path, args.draft_revision(server_args)
        )
    )


def _refuse(server_args: Any) -> None:
    for field, is_set, flag, reason in _REFUSED:
        value = getattr(server_args, field, None)
        if is_set(value):
            raise ConfigError(f"{flag} cannot be combined with C2T ({field} is {value!r}): {reason}; leave it out")


def _check_disaggregation(server_args: Any, base: str, config: C2TConfig) -> None:
    mode = getattr(server_args, "disaggregation_mode", None)
    if mode in (None, "null"):
        return
    for unfit, found, reason in (
        (base == "STANDALONE", "a stand-alone draft", "SGLang transfers no first draft token for those"),
        (config.mode == "tree", "trees", "the first layer needs a distribution, and SGLang transfers none"),
    ):
        if unfit:
            raise ConfigError(f"--disaggregation-mode {mode} cannot be combined with {found}: {reason}; leave it out")


def _check_dp_attention(server_args: Any, base: str, config: C2TConfig) -> None:
    # SGLang 0.5.23 has turned the older spelling, whose width is dp_size, into the newer one by now
    older = getattr(server_args, "dp_size", None) if getattr(server_args, "enable_dp_attention", False) else 1
    if max(older or 1, getattr(server_args, "attn_dp_size", None) or 1) > 1:
        from c2t_plugin.engines.sglang import dp_attention

        dp_attention.check(server_args, base, config)


def _check_curve(config: C2TConfig) -> None:
    """Raises ConfigError if the cost curve can neither be read nor be made."""
    if startup.load_curve(config) is None and config.curve is not None and not os.path.isdir(config.curve.parent):
        raise ConfigError(
            f"planner {str(config.curve)!r} is not there, and neither is its directory to make it in; "
            "expected on, off, or a file in a directory that exists"
        )


def _check_learned(server_args: Any, base: str, config: C2TConfig, classifier: NodeClassifier) -> None:
    """Raises C2TError if what is learnt can neither be read from its file nor written there."""
    if config.learned is None:
        return
    replicas = getattr(server_args, "dp_size", None) or 1
    if replicas > 1:
        raise ConfigError(
            f"--dp-size {replicas} cannot be combined with --speculative-c2t-learned {config.learned}: each replica "
            "learns by itself and would overwrite what others wrote; leave it out, or start servers with a file each"
        )
    learned.check(config, classifier, startup.pair_of(server_args, base), network=learning.trains(config))


def _check_packing(server_args: Any, config: C2TConfig) -> None:
    """What can be known of a named packing attention before there is a model; verify/choice knows the rest."""
    wanted, flag = args.ATTENTION_OF.get(config.packing), f"--speculative-c2t-packing {config.packing}"
    remedy = "use auto"
    if config.attention == TREE_ATTENTION:
        wanted, flag, remedy = "triton", f"--speculative-c2t-attention {config.attention}", "leave it out"
    if wanted is None:
        return
    if config.mode == "tree" and config.packing in PACKING and config.packing not in MASKED:
        raise ConfigError(f"{flag} packs chains only; leave it out in mode tree")
    apart = args.ATTENTION_OF.get(config.verify_attention)
    if apart not in (None, wanted):
        raise ConfigError(
            f"{flag} cannot be had: --speculative-c2t-verify-attention is {config.verify_attention}; leave one out"
        )
    for field in _BACKENDS if apart is None else ():
        # SGLang has chosen one where the command line has not.
        found = getattr(server_args, field, None)
        if found not in (None, wanted):
            raise ConfigError(
                f"{flag} cannot be had: {field} is {found}; {remedy}, or start with --attention-backend {wanted}"
            )


def _check_prefill_graphs(server_args: Any, config: C2TConfig) -> None:
    """Such a graph holds the attention of its capture, and prefills run with that of the last step's depth."""
    graphs = getattr(server_args, "cuda_graph_config", None)
    prefill = graphs.get("prefill") if isinstance(graphs, dict) else getattr(graphs, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, dict) else getattr(prefill, "backend", None)
    if config.plans_chains and "full" in (backend, getattr(server_args, "cuda_graph_backend_prefill", None)):
        raise ConfigError(
            "--cuda-graph-backend-prefill full cannot be combined with a planner, whose depths have attention of their "
            "own: use breakable, or --speculative-c2t-planner off"
        )


def _shape(server_args: Any, config: C2TConfig) -> None:
    """Draft steps, top-k and verified width of the mode."""
    steps = server_args.speculative_num_steps
    if steps is not None and steps < 1:
        raise ConfigError(f"--speculative-num-steps is {steps}; C2T needs at least 1 draft step")
    server_args.speculative_num_steps = DEFAULT_STEPS if steps is None else steps
    if config.mode == "tree":
        if config.trace_dir is not None:
            raise ConfigError("--speculative-c2t-trace-dir records chains; leave it out in tree mode")
        tree_options.resolve(server_args, config.policy)
    else:
        _resolve_chain(server_args)


def _resolve_chain(server_args: Any) -> None:
    topk = server_args.speculative_eagle_topk
    if topk not in (None, 1):
        raise ConfigError(
            f"--speculative-eagle-topk is {topk}; chain mode drafts one token per step: use 1, leave it out, or draft "
            "trees with --speculative-c2t-mode tree"
        )
    fitting, width = server_args.speculative_num_steps + 1, server_args.speculative_num_draft_tokens
    if width not in (None, fitting):
        raise ConfigError(
            f"--speculative-num-draft-tokens is {width}; in chain mode it is the draft steps plus one ({fitting}): "
            "leave it out"
        )
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = fitting
