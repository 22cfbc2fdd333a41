"""From `--speculative-config '{"method": "c2t:eagle3", ...}'` to a stock speculative method and C2T's own settings.

Before vLLM builds its configuration `translate` takes C2T's keys out of the arguments; afterwards `settle` checks what
vLLM made of the rest and writes the settings that every worker reads: `additional_config["c2t"]`.
"""

from __future__ import annotations

import logging
import os.path
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from c2t_plugin.config import AUTO, NONE, OFF, OLD_NAMES, C2TConfig
from c2t_plugin.engines.checkpoints import find_classifier, load_fitting_classifier
from c2t_plugin.engines.served_traces import check_directory
from c2t_plugin.engines.vllm import learns
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import switched_depths
from c2t_plugin.request_options import shown

logger = logging.getLogger("vllm.c2t")

METHOD = "c2t"
PREFIX = "c2t_"
KEY = "c2t"
# Stock methods whose drafts are scored, and the kind of draft a classifier is for.
BASES = {"draft_model": "standalone", "eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp"}

# The platform's choice of worker, and the one of ours that stands over it.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "c2t_plugin.engines.vllm.worker_cpu.C2TWorker",
    "vllm.v1.worker.gpu_worker.Worker": "c2t_plugin.engines.vllm.worker_gpu.C2TWorker",
}

# Without a planner, by whether scheduling is asynchronous.
SCHEDULERS = {
    False: "c2t_plugin.engines.vllm.verified.CountingScheduler",
    True: "c2t_plugin.engines.vllm.verified.AsyncCountingScheduler",
}

PLANNING = "c2t_plugin.engines.vllm.planned.PlanningScheduler"

# Options of C2T that mean nothing here, and why.
_OTHER_ENGINES = {
    "packing": "vLLM verifies chains of unequal length as they are",
    "rows": "vLLM verifies chains of unequal length as they are",
    "attention": "vLLM verifies by its own attention backends",
    "verify_attention": "vLLM verifies by its own attention backends",
    "self_check": "vLLM verifies by its own attention backends",
    "request_tiers": "on vLLM no answer tells rows",
    "policy": "vLLM drafts chains, and they have one",
}

# Whether a resolved speculative configuration is in the way, what to name, why.
_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda spec: spec.method not in BASES, "this speculative method", f"C2T scores {', '.join(BASES)} drafts"),
    (lambda spec: spec.use_local_argmax_reduction, "use_local_argmax_reduction", "there are no logits to score"),
    (lambda spec: spec.parallel_drafting, "parallel_drafting", "there are no logits per draft step"),
    (lambda spec: spec.use_gemma4_mtp(), "a Gemma 4 draft", "its drafts bypass the logits that C2T scores"),
    (lambda spec: spec.use_step3p5_mtp(), "a Step 3.5 draft", "its drafts bypass the logits that C2T scores"),
    (lambda spec: spec.use_multi_module_mtp(), "an MTP draft of several modules", "it has one head per draft step"),
    (lambda spec: spec.use_heterogeneous_vocab, "use_heterogeneous_vocab", "tokens are dropped after the scoring"),
    (
        lambda spec: spec.rejection_sample_method != "standard",
        "rejection_sample_method other than standard",
        "only the standard one is known to stay exact when drafts are cut",
    ),
)


@dataclass(frozen=True)
class Settings:
    """What a worker needs, as it travels in `additional_config["c2t"]`.

    classifier: path of the file. origin: where it came from. beta: threshold in [0, 1]. base: the kind of draft.
    trace_dir, trace_share, trace_limit, trace_precision: see C2TConfig. planned: whether a planner decides; it then
    does so in the place of beta, which is 0. curve: file of its costs. estimates: whether what confidences mean is
    learnt under adaptive verification. learn, learned, request_settings: see C2TConfig.
    """

    classifier: str
    origin: str
    beta: float
    base: str
    trace_dir: str | None = None
    trace_share: float = C2TConfig.trace_share
    trace_limit: float = C2TConfig.trace_limit
    trace_precision: str = C2TConfig.trace_precision
    planned: bool = False
    curve: str | None = None
    estimates: bool = False
    learn: str = C2TConfig.learn
    learned: str | None = None
    request_settings: str = C2TConfig.request_settings

    @classmethod
    def of(cls, vllm_config: Any) -> Settings | None:
        """The settings of an engine, None if C2T was not asked for."""
        additional = vllm_config.additional_config
        found = additional.get(KEY) if isinstance(additional, Mapping) else None
        return None if found is None else cls(**found)

    def log(self, logger: logging.Logger, method: str, d_max: int, where: str) -> None:
        """Say what runs."""
        text = "C2T: base %s, chains of at most %d, %s, classifier %s (%s); %s"
        rule = "a planner decides" if self.planned else f"beta {self.beta}"
        logger.info(text, method, d_max, rule, self.classifier, self.origin, where)
        if self.origin.startswith("shipped"):
            logger.warning("C2T: this classifier was fitted on another pair; fit your own: c2t collect, then c2t fit")


def translate(arguments: Any) -> C2TConfig | None:
    """Take C2T's options out of vLLM's argument record; None if it does not ask for C2T.

    Raises ConfigError for options that do not hold.
    """
    options = _options(arguments)
    if options is None:
        return None
    foreign = sorted({OLD_NAMES.get(name, name) for name in options} & set(_OTHER_ENGINES))
    if foreign:
        raise ConfigError(f"{PREFIX}{foreign[0]} is for SGLang: {_OTHER_ENGINES[foreign[0]]}; leave it out")
    C2TConfig.from_mapping(options)  # resolve asks for known options only
    config = C2TConfig.resolve(options)
    if config.mode != "chain":
        raise ConfigError(
            f"c2t_mode is {config.mode!r}: vLLM has no tree attention, so C2T drafts chains there; for trees use SGLang"
        )
    if not arguments.speculative_config:
        raise ConfigError('C2T needs a draft: --speculative-config \'{"method": "c2t", "model": ...}\'')
    if arguments.worker_cls != "auto":
        raise ConfigError(f"--worker-cls {arguments.worker_cls} cannot be combined with C2T, which brings its own")
    _without_async(arguments)
    return config


def _options(arguments: Any) -> dict[str, Any] | None:
    given, additional = arguments.speculative_config or {}, arguments.additional_config or {}
    if not isinstance(given, Mapping):
        return None  # which vLLM refuses
    spec = {str(name).replace("-", "_"): value for name, value in given.items()}
    method, _, base = str(spec.get("method") or "").partition(":")
    named = method == METHOD
    own = {name.removeprefix(PREFIX): spec.pop(name) for name in list(spec) if name.startswith(PREFIX)}
    if own and not named:
        name = shown(PREFIX + next(iter(own))).strip("'")
        raise ConfigError(f'{name} is set, but the method is {spec.get("method")!r}, not "c2t"')
    if not isinstance(additional, Mapping):
        if not named:
            return None
        raise ConfigError(f"additional_config must be an object, got {shown(additional)}")
    additional = dict(additional)
    beside = additional.pop(KEY, None)
    if beside is None and not named:
        return None
    if not isinstance(beside, Mapping | None):
        raise ConfigError(f'additional_config["{KEY}"] must be an object, got {shown(beside)}')
    if named:
        if base and base not in BASES:
            raise ConfigError(f"method is {spec['method']!r}; after the colon C2T knows {', '.join(BASES)}")
        # without a base vLLM finds the method out by itself
        spec.pop("method")
        if not base and spec.get("model") is None:
            raise ConfigError('method "c2t" names no draft "model"; if the target carries its own, say "c2t:mtp"')
        arguments.speculative_config = {**spec, **({"method": base} if base else {})}
    options = {**(beside or {}), **own}
    # so that a record which is asked again still asks for C2T
    arguments.additional_config = {**additional, KEY: options}
    return options


def _without_async(arguments: Any) -> None:
    """Chains of unequal length need the scheduler to wait for them, unless vLLM's adaptive verification cuts them."""
    if arguments.speculative_config.get("enable_adaptive_verification"):
        return
    if arguments.async_scheduling:
        raise ConfigError(
            "--async-scheduling fixes the number of drafts before they are scored: leave it out, or let vLLM cut by "
            "C2T's confidences with enable_adaptive_verification in --speculative-config"
        )
    arguments.async_scheduling = False


def settle(vllm_config: Any, config: C2TConfig) -> Settings:
    """Check vLLM's resolved configuration, choose the classifier, and write both into that configuration.

    Raises ConfigError or ClassifierError.
    """
    spec = vllm_config.speculative_config
    for is_set, what, reason in _REFUSED:
        if is_set(spec):
            raise ConfigError(f"{what} cannot be combined with C2T (method {spec.method!r}): {reason}")
    _check_head(spec)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size above 1 cannot be combined with C2T: it was never tried")
    if vllm_config.lora_config is not None:
        raise ConfigError("--enable-lora cannot be combined with C2T: a draft knows no adapters; leave it out")
    worker = vllm_config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise ConfigError(f"vLLM chose the worker {worker}, C2T knows {', '.join(WORKERS)}: use a CPU or CUDA device")
    scheduler = vllm_config.scheduler_config
    if spec.enable_adaptive_verification and (own := scheduler.scheduler_cls) is not None:
        raise ConfigError(f"--scheduler-cls {own} cannot be combined with adaptive verification by C2T")
    if config.trace_dir is not None and spec.enable_adaptive_verification:
        raise ConfigError("trace_dir cannot be combined with enable_adaptive_verification: leave one of them out")
    check_directory(config)
    config = _planned(vllm_config, config)
    base = BASES[spec.method]
    if config.base not in ("auto", base):
        raise ConfigError(f"base is {config.base!r}, but vLLM drafts with {spec.method}; leave the base out")
    adaptive = spec.enable_adaptive_verification
    path, origin = find_classifier(
        config, base, spec.model, revision=spec.revision, probabilities=adaptive or config.planned
    )
    classifier = load_fitting_classifier(path, config)
    learn, learned = learns.settled(vllm_config, config, classifier, base)
    estimates = adaptive and learns.estimates(vllm_config, config, classifier, base)
    fitted, mended = classifier.spec, estimates or (config.planned and learn != OFF)
    learns.warn(path, fitted, base, probabilities=(adaptive or config.planned) and not mended)
    # what a threshold of another pair would cut is what is learnt of
    suggested = 0.0 if estimates else fitted.suggested_beta
    beta = suggested if config.beta is None else config.beta
    recorded = (config.trace_dir, config.trace_share, config.trace_limit, config.trace_precision)
    settings = Settings(
        str(path),
        origin,
        0.0 if config.planned else beta,
        base,
        *recorded,
        planned=config.planned,
        curve=None if config.curve is None else str(config.curve),
        estimates=estimates,
        learn=learn,
        learned=learned,
        # vLLM's adaptive verification cuts by its own budget
        request_settings=NONE if adaptive else config.request_settings,
    )
    vllm_config.additional_config = {**vllm_config.additional_config, KEY: asdict(settings)}
    vllm_config.parallel_config.worker_cls = WORKERS[worker]
    if config.planned:
        scheduler.scheduler_cls = PLANNING
        if not worker.endswith(".CPUWorker"):
            spec.num_speculative_tokens_per_batch_size = _every_depth(spec.num_speculative_tokens)
    elif scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULERS[scheduler.async_scheduling]
    else:
        logger.info("C2T: --scheduler-cls %s counts no steps without a draft", scheduler.scheduler_cls)
    return settings


def _planned(vllm_config: Any, config: C2TConfig) -> C2TConfig:
    """With the planner off where `auto` cannot have one. Raises ConfigError where one is asked for and cannot be."""
    if not config.planned:
        return config
    spec, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    v2, on_gpu = vllm_config.use_v2_model_runner, not vllm_config.parallel_config.worker_cls.endswith(".CPUWorker")
    reasons = {
        "vLLM's adaptive verification decides": spec.enable_adaptive_verification,
        "on a GPU it takes model runner V2": on_gpu and not v2,
        "on model runner V2 it has to be asked for": v2 and config.planner == AUTO,
        "each of its depths wants a size of batch, and --max-num-seqs leaves fewer": (
            v2 and on_gpu and scheduler.max_num_seqs < len(switched_depths(spec.num_speculative_tokens))
        ),
        "ranks of data parallelism have to agree on a depth": vllm_config.parallel_config.data_parallel_size > 1,
        "what is recorded is drafted whole": config.trace_dir is not None,
        "num_speculative_tokens_per_batch_size decides": bool(spec.num_speculative_tokens_per_batch_size),
        f"--scheduler-cls is {scheduler.scheduler_cls}": scheduler.scheduler_cls is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None:
        if config.curve is not None and os.path.exists(config.curve):
            from c2t_plugin.planner.curve_file import read_curve

            read_curve(config.curve)
        return config
    if config.planner == AUTO:
        return replace(config, planner=OFF)
    raise ConfigError(f"planner {config.planner} cannot decide here: {reason}; leave it out")


def _every_depth(d_max: int) -> list[tuple[int, int, int]]:
    """vLLM captures CUDA graphs for the depths that its own table names, by size of batch. A planner stands in the
    table's place, so it names each depth once."""
    return [(size, size, depth) for size, depth in enumerate(reversed(switched_depths(d_max)), start=1)]


def _check_head(spec: Any) -> None:
    """vLLM tells a head by its checkpoint's name, and loads one of another name as a model that stands alone."""
    if spec.method != "draft_model":
        return
    head = next((name for name in spec.draft_model_config.architectures if "eagle" in name.lower()), None)
    if head is not None:
        method = "c2t:eagle3" if "eagle3" in head.lower() else "c2t:eagle"
        raise ConfigError(f'{spec.model} is an EAGLE head ({head}), no stand-alone draft: set the method "{method}"')
