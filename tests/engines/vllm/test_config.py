"""Translation of options, refusals, and the contract: everything that happens before an engine starts.

One file, because every test alters the same few argument records.
"""

from __future__ import annotations

import json
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from packaging.requirements import Requirement  # noqa: E402

from benchmarks.pairs.toy import SHIPPED  # noqa: E402
from c2t_plugin.classifier import FILE_NAME, ClassifierSpec, NodeClassifier, save_classifier  # noqa: E402
from c2t_plugin.engines.checkpoints import CLASSIFIERS, find_classifier  # noqa: E402
from c2t_plugin.engines.contract import EngineSymbol, broken_symbols, package_root  # noqa: E402
from c2t_plugin.engines.patching import ATTRIBUTE  # noqa: E402
from c2t_plugin.engines.vllm import config, contract, plugin  # noqa: E402
from c2t_plugin.engines.vllm.learns import pair_of  # noqa: E402
from c2t_plugin.errors import C2TError, ClassifierError, ConfigError, ContractError  # noqa: E402

MODEL = {"model": "draft", "num_speculative_tokens": 4}


def arguments(spec: dict[str, Any] | None, **other: Any) -> types.SimpleNamespace:
    fields = {"additional_config": {}, "async_scheduling": None, "worker_cls": "auto"}
    return types.SimpleNamespace(speculative_config=spec, **{**fields, **other})


def resolved(**spec: Any) -> types.SimpleNamespace:
    """What vLLM makes of the stock part, as far as `settle` looks at it."""
    fields = {
        "method": "draft_model",
        "model": str(SHIPPED / "draft"),
        "draft_model_config": types.SimpleNamespace(architectures=["LlamaForCausalLM"]),
        "use_local_argmax_reduction": False,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "rejection_sample_method": "standard",
        "enable_adaptive_verification": False,
        "revision": None,
        "num_speculative_tokens_per_batch_size": None,
    }
    no = {name: lambda: False for name in ("use_gemma4_mtp", "use_step3p5_mtp", "use_multi_module_mtp")}
    return types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(**{**fields, **no, **spec}),
        parallel_config=types.SimpleNamespace(
            worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", pipeline_parallel_size=1, data_parallel_size=1
        ),
        scheduler_config=types.SimpleNamespace(scheduler_cls=None, async_scheduling=False),
        model_config=types.SimpleNamespace(model=str(SHIPPED / "target"), revision=None),
        additional_config={"other": 1},
        lora_config=None,
        use_v2_model_runner=False,
    )


@pytest.mark.parametrize(
    ("method", "stock"),
    [("c2t", {}), *((f"c2t:{base}", {"method": base}) for base in ("draft_model", "eagle", "eagle3", "mtp"))],
)
def test_the_stock_part_is_left(method: str, stock: dict[str, str]):
    record = arguments({"method": method, **MODEL, "c2t_beta": 0.3, "c2t_classifier": "file"})
    found = config.translate(record)
    assert found is not None
    assert (found.beta, found.classifier) == (0.3, "file")
    assert record.speculative_config == {**MODEL, **stock}
    assert record.async_scheduling is False


def test_additional_config_works_too():
    record = arguments({"method": "eagle3", **MODEL}, additional_config={"c2t": {"beta": 0.2}, "other": 1})
    found = config.translate(record)
    assert found is not None and found.beta == 0.2
    assert record.speculative_config == {"method": "eagle3", **MODEL}
    assert record.additional_config == {"c2t": {"beta": 0.2}, "other": 1}


@pytest.mark.parametrize("spec", [None, {"method": "eagle3", **MODEL}, {"method": "ngram"}, [1], "c2t", 7, True])
def test_others_are_left_alone(spec: dict[str, Any] | None):
    record = arguments(spec, async_scheduling=True)
    before = dict(vars(record))
    assert config.translate(record) is None
    assert vars(record) == before


def test_adaptive_verification_keeps_its_scheduling():
    record = arguments({"method": "c2t", **MODEL, "enable_adaptive_verification": True}, async_scheduling=True)
    assert config.translate(record) is not None
    assert record.async_scheduling is True


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (arguments({"method": "c2t", **MODEL, "c2t_bta": 0.3}), "unknown option bta"),
        (arguments({"method": "c2t", **MODEL, "c2t_beta": 2}), r"beta must be a number in \[0, 1\], got 2"),
        (arguments({"method": "c2t", **MODEL, "c2t_packing": "fa3"}), "c2t_packing is for SGLang: vLLM verifies"),
        (arguments({"method": "c2t", **MODEL, "c2t_plan": "lagged"}), "c2t_rows is for SGLang: vLLM verifies"),
        (arguments({"method": "c2t", **MODEL, "c2t_policy": "prob"}), "c2t_policy is for SGLang"),
        (arguments({"method": "c2t", **MODEL, "c2t_request_tiers": "on"}), "tiers is for SGLang: on vLLM no answer"),
        (arguments({"method": "c2t", **MODEL, "c2t_mode": "tree"}), "no tree attention.*SGLang"),
        (arguments({"method": "c2t:medusa", **MODEL}), "after the colon C2T knows draft_model, eagle, eagle3, mtp"),
        (arguments({"method": "eagle", **MODEL, "c2t_beta": 0.3}), "c2t_beta is set, but the method is 'eagle'"),
        (arguments(None, additional_config={"c2t": {}}), "C2T needs a draft"),
        (arguments({"method": "c2t", "num_speculative_tokens": 4}), 'names no draft "model".*"c2t:mtp"'),
        (arguments({"method": "c2t", **MODEL}, additional_config={"c2t": 0.3}), "must be an object, got 0.3"),
        (arguments({"method": "c2t", **MODEL}, additional_config=[1]), r"must be an object, got \[1\]"),
        (arguments({"method": "c2t", **MODEL}, additional_config="c2t"), "additional_config must be an object"),
        (arguments({"method": "eagle", "c2t_\n": 1}), r"^c2t_\\\\n is set, but the method is 'eagle'"),
        (arguments({"method": "c2t", **MODEL}, async_scheduling=True), "--async-scheduling fixes the number"),
        (arguments({"method": "c2t", **MODEL}, worker_cls="my.Worker"), "--worker-cls my.Worker cannot be combined"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_refused(record: types.SimpleNamespace, message: str):
    with pytest.raises(ConfigError, match=message):
        config.translate(record)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "ngram"}, "this speculative method cannot be combined.*'ngram'"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction cannot be combined"),
        ({"parallel_drafting": True}, "parallel_drafting cannot be combined"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab cannot be combined"),
        ({"method": "mtp", "use_gemma4_mtp": lambda: True}, "a Gemma 4 draft cannot be combined"),
        ({"method": "mtp", "use_step3p5_mtp": lambda: True}, "a Step 3.5 draft cannot be combined"),
        ({"method": "mtp", "use_multi_module_mtp": lambda: True}, "an MTP draft of several modules cannot"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method other than standard cannot be combined"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_vllm_resolved_can_be_refused(spec: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config.settle(resolved(**spec), config.C2TConfig())


def test_pipelines_and_unknown_workers_are_refused():
    found = resolved()
    found.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="--pipeline-parallel-size above 1"):
        config.settle(found, config.C2TConfig())
    found = resolved()
    found.parallel_config.worker_cls = "vllm.v1.worker.xpu_worker.XPUWorker"
    with pytest.raises(ConfigError, match=r"XPUWorker, C2T knows .*CPUWorker"):
        config.settle(found, config.C2TConfig())


def test_the_settings_reach_the_worker(tmp_path: Path):
    found = resolved()
    named = tmp_path / "named.safetensors"
    save_classifier(NodeClassifier(ClassifierSpec(suggested_beta=0.25)), named)
    config.settle(found, config.C2TConfig(classifier=str(named), planner="off"))
    assert config.Settings.of(found) == config.Settings(str(named), "named", 0.25, "standalone")
    assert found.additional_config["other"] == 1
    assert found.parallel_config.worker_cls == "c2t_plugin.engines.vllm.worker_cpu.C2TWorker"


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_scheduler_of_ours_counts(asynchronous: bool, adaptive: bool):
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    found = resolved(enable_adaptive_verification=adaptive)
    found.scheduler_config.async_scheduling = asynchronous
    config.settle(found, config.C2TConfig(planner="off"))
    chosen = resolve_obj_by_qualname(found.scheduler_config.scheduler_cls)
    assert issubclass(chosen, AsyncScheduler) is asynchronous


def test_a_scheduler_of_the_users_stays(caplog: pytest.LogCaptureFixture):
    own = resolved()
    own.scheduler_config.scheduler_cls = "mine.Scheduler"
    with caplog.at_level("INFO", "vllm.c2t"):
        config.settle(own, config.C2TConfig(planner="off"))
    assert own.scheduler_config.scheduler_cls == "mine.Scheduler"
    assert "--scheduler-cls mine.Scheduler counts no steps without a draft" in caplog.text
    adaptive = resolved(enable_adaptive_verification=True)
    adaptive.scheduler_config.scheduler_cls = "mine.Scheduler"
    with pytest.raises(ConfigError, match=r"--scheduler-cls mine\.Scheduler cannot be combined with adaptive"):
        config.settle(adaptive, config.C2TConfig())


def test_where_traces_are_recorded(tmp_path: Path):
    options = config.C2TConfig(trace_dir=str(tmp_path / "new"), trace_share=0.5, trace_limit=7.0)
    settings = config.settle(resolved(), options)
    assert (settings.trace_dir, settings.trace_share, settings.trace_limit) == (str(tmp_path / "new"), 0.5, 7.0)
    assert (tmp_path / "new").is_dir()
    found = resolved(enable_adaptive_verification=True)
    with pytest.raises(ConfigError, match="trace_dir cannot be combined with enable_adaptive_verification"):
        config.settle(found, options)


def test_without_c2t_there_are_no_settings():
    assert config.Settings.of(resolved()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classifier": "none.safetensors"}, "neither a file nor a directory"),
        ({"top_m": 7}, "top_m is 7, but"),
        ({"base": "eagle3"}, "base is 'eagle3', but vLLM drafts with draft_model"),
    ],
)
def test_classifiers_that_do_not_hold(options: dict[str, Any], message: str):
    with pytest.raises(C2TError, match=message):
        config.settle(resolved(), config.C2TConfig(**options))


@pytest.mark.parametrize(
    ("method", "kind"), [("draft_model", "draft"), ("eagle", "eagle1"), ("eagle3", "eagle3"), ("mtp", "mtp")]
)
def test_a_classifier_ships_for_every_method(method: str, kind: str):
    # no classifier lies beside the target
    found = resolved(method=method, model=str(SHIPPED / "target"))
    settings = config.settle(found, config.C2TConfig(planner="off"))
    assert (settings.classifier, settings.origin) == (str(CLASSIFIERS / kind / FILE_NAME), "shipped, generic")


def test_the_drafts_revision_pins_the_classifier(layout: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def find(*positional: Any, revision: str | None, **keyword: Any) -> Any:
        seen.append(revision)
        return find_classifier(*positional, **keyword)

    monkeypatch.setattr(config, "find_classifier", find)
    config.settle(resolved(revision="d1"), config.C2TConfig())
    assert seen == ["d1"]


def test_a_damaged_classifier_is_named(tmp_path: Path):
    broken = tmp_path / FILE_NAME
    broken.write_bytes(b"no tensors")
    with pytest.raises(ClassifierError, match="is not a readable safetensors file"):
        config.settle(resolved(), config.C2TConfig(classifier=str(broken)))


@pytest.mark.parametrize(
    ("spec", "training", "pair", "said"),
    [
        ({}, {}, {"kind": "draft"}, None),
        ({}, {}, {}, None),
        ({"method": "eagle"}, {}, {"kind": "eagle1"}, None),
        ({"method": "eagle"}, {}, {"kind": "eagle3"}, "was fitted on eagle3 drafts, these are eagle1"),
        ({"enable_adaptive_verification": True}, {"calibrated": "chain"}, {}, None),
        ({"enable_adaptive_verification": True}, {"calibrated": "tree"}, {}, "take confidences for probabilities"),
        ({"enable_adaptive_verification": True}, {}, {}, "take confidences for probabilities"),
        ({"enable_adaptive_verification": False}, {"calibrated": "none"}, {}, None),
    ],
    ids=["same kind", "no kind", "eagle", "other kind", "calibrated", "on trees", "not calibrated", "not adaptive"],
)
def test_what_makes_confidences_poor_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    training: dict[str, Any],
    pair: dict[str, Any],
    said: str | None,
):
    lines: list[str] = []
    monkeypatch.setattr(config.logger, "warning", lambda text, *values: lines.append(text % values))
    named = tmp_path / "named.safetensors"
    save_classifier(NodeClassifier(ClassifierSpec(training=training, pair=pair)), named)
    config.settle(resolved(**spec), config.C2TConfig(classifier=str(named), planner="off", learn="off"))
    assert len(lines) == (0 if said is None else 1)
    assert said is None or said in lines[0]


@pytest.mark.parametrize("learn", ["calibrate", "network", "auto"])
@pytest.mark.parametrize(
    ("spec", "options"),
    [({}, {"planner": "off"}), ({}, {"beta": 0.5})],
    ids=["no planner", "beta"],
)
def test_what_learns_nothing_though_it_was_asked_to_says_so(
    spec: dict[str, Any], options: dict[str, Any], learn: str, caplog: pytest.LogCaptureFixture
):
    config.settle(resolved(**spec), config.C2TConfig(learn=learn, **options))
    said = f"learn {learn} is for a planner of chains, and there is none: nothing is learnt"
    assert caplog.text.count(said) == int(learn != "auto")


@pytest.mark.parametrize(
    ("learn", "own", "learns"),
    [
        *(("auto", False, True), ("auto", True, False), ("calibrate", True, True), ("network", False, True)),
        ("off", False, False),
    ],
)
def test_adaptive_verification_learns_what_confidences_mean(
    learn: str,
    own: bool,
    learns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """own: whether the classifier was fitted on the pair that is served."""
    found = resolved(enable_adaptive_verification=True)
    pair = pair_of(found, "standalone")() if own else {"kind": "draft", "target": "another"}
    named = tmp_path / "named.safetensors"
    save_classifier(NodeClassifier(ClassifierSpec(pair=pair, suggested_beta=0.25)), named)
    options = config.C2TConfig(classifier=str(named), learn=learn)
    with caplog.at_level("INFO", "vllm.c2t"):
        settings = config.settle(found, options)
    # a threshold would cut what is to be learnt of, but for one that was asked for
    assert (settings.estimates, settings.beta) == (learns, 0.0 if learns else 0.25)
    said = "adaptive verification learns what confidences mean" in caplog.text
    assert said == learns and ("take confidences for probabilities" in caplog.text) != learns
    assert ("learn network is calibrate under adaptive verification" in caplog.text) == (learn == "network")
    assert config.settle(resolved(enable_adaptive_verification=True), replace(options, beta=0.5)).beta == 0.5
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    settings = config.settle(resolved(enable_adaptive_verification=True), options)
    assert not settings.estimates and ("learns nothing: VLLM_BATCH_INVARIANT" in caplog.text) == learns


@pytest.mark.parametrize("learn", ["calibrate", "network", "auto"])
def test_nothing_is_learnt_where_batches_are_not_to_matter(learn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(config.logger, "warning", lambda text, *values: lines.append(text % values))
    said = "C2T: learns nothing: VLLM_BATCH_INVARIANT"
    options = config.C2TConfig(learn=learn, learned=str(tmp_path / "learned.safetensors"))
    settings = config.settle(resolved(), options)
    assert (settings.learn, settings.learned) == (learn, options.learned)
    assert not any(line.startswith(said) for line in lines)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    settings = config.settle(resolved(), options)
    assert settings.planned and (settings.learn, settings.learned) == ("off", None)
    assert [line.startswith(said) for line in lines].count(True) == 1
    # of one that plans nothing there is nothing to say
    lines.clear()
    config.settle(resolved(), config.C2TConfig(planner="off"))
    assert lines == []


# --- the contract


def test_the_installed_vllm_keeps_the_contract():
    import vllm

    contract.check(vllm.__version__)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (("vllm.__version__", "0.34.0"), r"vLLM 0\.34\.0 is installed, C2T was tested with vLLM 0\.32 or 0\.33: "),
        (
            ("c2t_plugin.engines.vllm.contract.SYMBOLS", (EngineSymbol("config/vllm.py", "VllmConfig.dream"),)),
            r"vllm .* is not as C2T needs it: config/vllm\.py: VllmConfig\.dream \(not found\)\. ",
        ),
    ],
    ids=["release", "symbol"],
)
def test_an_engine_checks_the_contract_first(
    layout: Path, monkeypatch: pytest.MonkeyPatch, planted: tuple[str, Any], message: str
):
    monkeypatch.delenv("C2T_UNTESTED_RELEASE", raising=False)
    plugin.register()
    record = engine_arguments(layout)
    setattr(record, ATTRIBUTE, True)
    monkeypatch.setattr(*planted)
    with pytest.raises(SystemExit, match=rf"^C2T: {message}[^\n]*$"):
        record.create_engine_config()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_an_unknown_release_is_refused_in_one_line_unless_asked_for(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("C2T_UNTESTED_RELEASE", raising=False)
    said = f"^vLLM {version} is installed, C2T was tested with vLLM 0.32 or 0.33: .*$"
    with pytest.raises(ContractError, match=said):
        contract.check(version)
    monkeypatch.setenv("C2T_UNTESTED_RELEASE", "1")
    contract.check(version)


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0", "0.33.1"])
def test_a_release_that_was_tested_needs_no_wish(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("C2T_UNTESTED_RELEASE", raising=False)
    contract.check(version)


@pytest.mark.parametrize(
    ("version", "tested"), [("0.31.9", False), ("0.32.0", True), ("0.33.1", True), ("0.34.0", False)]
)
def test_pip_installs_a_release_that_was_tested(version: str, tested: bool, root: Path):
    (wanted,) = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert Requirement(wanted).specifier.contains(version) is tested
    assert version.startswith(contract.RELEASES) is tested


def test_a_missing_symbol_is_named():
    root = package_root("vllm")
    assert root is not None
    gone = EngineSymbol("v1/spec_decode/llm_base_proposer.py", "SpecDecodeBaseProposer.dream")
    (problem,) = broken_symbols(root, [gone])
    assert "SpecDecodeBaseProposer.dream (not found)" in problem


# --- inside vLLM


def test_registering_twice_wraps_once():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once


def engine_arguments(layout: Path, **spec: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "c2t:eagle3", "model": str(layout / "eagle3"), "num_speculative_tokens": 4, **spec}
    return EngineArgs(model=str(layout / "target"), speculative_config=speculative, max_model_len=512)


def test_vllm_resolves_what_was_translated(layout: Path):
    record = engine_arguments(layout, c2t_beta=0.35)
    for _ in range(2):  # vLLM may ask the same record twice
        found = record.create_engine_config()
        assert found.speculative_config.method == "eagle3"
        settings = config.Settings.of(found)
        assert settings is not None
        assert (settings.beta, settings.origin) == (0.35, "shipped, generic")
        assert Path(settings.classifier) == CLASSIFIERS / "eagle3" / FILE_NAME
        assert found.parallel_config.worker_cls.endswith("worker_cpu.C2TWorker")


@pytest.mark.parametrize(("draft", "method"), [("draft", "draft_model"), ("eagle3", "eagle3")])
def test_vllm_finds_the_method_out(layout: Path, draft: str, method: str):
    found = engine_arguments(layout, method="c2t", model=str(layout / draft)).create_engine_config()
    assert found.speculative_config.method == method
    assert config.Settings.of(found) is not None


@pytest.mark.parametrize(("name", "method"), [("eagle1", "c2t:eagle"), ("eagle3", "c2t:eagle3")])
def test_a_head_that_vllm_does_not_know_by_its_name(layout: Path, tmp_path: Path, name: str, method: str):
    (tmp_path / "head").symlink_to(layout / name)
    record = engine_arguments(layout, method="c2t", model=str(tmp_path / "head"))
    with pytest.raises(ConfigError, match=f'no stand-alone draft: set the method "{method}"'):
        record.create_engine_config()
    assert engine_arguments(layout, method=method, model=str(tmp_path / "head")).create_engine_config() is not None


def test_a_command_line_ends_with_one_line_and_a_program_gets_the_error(layout: Path):
    with pytest.raises(ConfigError, match="no tree attention"):
        engine_arguments(layout, c2t_mode="tree").create_engine_config()
    record = engine_arguments(layout, c2t_mode="tree")
    setattr(record, ATTRIBUTE, True)
    with pytest.raises(SystemExit, match=r"^C2T: c2t_mode is 'tree': vLLM has no tree attention[^\n]*$"):
        record.create_engine_config()


SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


def spec(layout: Path, base: str, **values: Any) -> dict[str, Any]:
    draft = {"eagle3": "eagle3", "draft_model": "draft", "eagle": "eagle1"}[base]
    return {"method": f"c2t:{base}", "model": str(layout / draft), "num_speculative_tokens": 4, **values}


@pytest.mark.parametrize(
    ("base", "values", "flags", "message"),
    [
        ("eagle3", {"c2t_bta": 0.3}, [], "unknown option bta"),
        ("eagle3", {"c2t_beta": 2}, [], "beta must be a number in [0, 1], got 2"),
        ("eagle3", {"c2t_mode": "tree"}, [], "for trees use SGLang"),
        ("eagle3", {"c2t_policy": "prob"}, [], "c2t_policy is for SGLang"),
        ("eagle3", {"c2t_classifier": "nowhere.safetensors"}, [], "neither a file nor a directory"),
        ("eagle3", {"c2t_classifier": "damaged"}, [], "is not a readable safetensors file"),
        ("eagle3", {"c2t_classifier": "wide"}, [], "has 65 hidden units, an engine takes at most 64"),
        ("eagle", {"method": "c2t"}, [], "is an EAGLE head (EagleLlamaForCausalLM), no stand-alone draft: set the"),
        ("eagle3", {"c2t_top_m": 7}, [], "top_m is 7, but"),
        ("eagle3", {"method": "c2t:medusa"}, [], "after the colon C2T knows"),
        ("eagle3", {}, ["--async-scheduling"], "--async-scheduling fixes the number of drafts"),
        ("eagle3", {}, ["--worker-cls", "my.Worker"], "--worker-cls my.Worker cannot be combined"),
        ("eagle3", {"use_local_argmax_reduction": True}, [], "use_local_argmax_reduction cannot be combined"),
        ("draft_model", {"parallel_drafting": True}, [], "parallel_drafting cannot be combined"),
        ("eagle3", SYNTHETIC, [], "rejection_sample_method other than standard"),
        ("eagle3", {}, ["--pipeline-parallel-size", "2"], "--pipeline-parallel-size above 1"),
        ("eagle3", {}, ["--enable-lora"], "--enable-lora cannot be combined with C2T: a draft knows no adapters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_is_one_line_on_a_command_line(
    layout: Path, tmp_path: Path, base: str, values: dict[str, Any], flags: list[str], message: str
):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    if values.get("c2t_classifier") == "damaged":
        values = {"c2t_classifier": str(tmp_path / "damaged.safetensors")}
        (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    if values.get("c2t_classifier") == "wide":
        values = {"c2t_classifier": str(tmp_path / "wide.safetensors")}
        save_classifier(NodeClassifier(ClassifierSpec(hidden=65)), Path(values["c2t_classifier"]))
    asked = ["--speculative-config", json.dumps(spec(layout, base, **values)), *flags]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    record = EngineArgs.from_cli_args(
        parser.parse_args(["--model", str(layout / "target"), "--max-model-len", "512", *asked])
    )
    with pytest.raises(SystemExit) as ended:
        record.create_engine_config()
    line = str(ended.value)
    assert line.startswith("C2T: ") and message in line and len(line.splitlines()) == 1
