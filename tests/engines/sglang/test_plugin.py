"""Registration, delegation, options and validation inside a real SGLang, without starting a server.

Longer than 300 lines because one import of SGLang, which takes seconds, serves all of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME, ClassifierSpec, NodeClassifier, save_classifier  # noqa: E402
from c2t_plugin.engines.checkpoints import classifier_kind, find_classifier  # noqa: E402
from c2t_plugin.engines.sglang import algo, args, checkpoints, validate  # noqa: E402
from c2t_plugin.errors import C2TError, ClassifierError, ConfigError  # noqa: E402


@pytest.fixture(autouse=True)
def no_c2t_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("CONFIG", "BETA", "BASE", "MODE", "POLICY", "CLASSIFIER", "TOP_M"):
        monkeypatch.delenv(f"C2T_{name}", raising=False)


def checkpoint(folder: Path, architecture: str, vocab_size: int = 64) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": vocab_size}))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> types.SimpleNamespace:
    target = checkpoint(tmp_path / "target", "LlamaForCausalLM")
    draft = checkpoint(tmp_path / "draft", "LlamaForCausalLM")
    save_classifier(NodeClassifier(ClassifierSpec()), draft / FILE_NAME)
    return types.SimpleNamespace(target=target, draft=draft)


def record(pair: types.SimpleNamespace, **changes: Any) -> types.SimpleNamespace:
    """Fields of SGLang's argument record that validation reads, as they are before resolution."""
    fields: dict[str, Any] = {
        "model_path": str(pair.target),
        "speculative_algorithm": "C2T",
        "speculative_draft_model_path": str(pair.draft),
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "disaggregation_mode": "null",
        "pp_size": 1,
        "tokenizer_worker_num": 1,
    }
    return types.SimpleNamespace(**{**fields, **changes})


# --- algorithms


@pytest.mark.parametrize("base", algo.BASES)
def test_every_public_method_of_the_enum_answers_as_the_base(base: str):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algo.register()
    ours, stock = SpeculativeAlgorithm.from_string(f"c2t_{base}"), SpeculativeAlgorithm[base]
    methods = [
        name
        for name, method in vars(SpeculativeAlgorithm).items()
        if isinstance(method, types.FunctionType) and not name.startswith("_")
    ]
    assert {"create_future_map", "need_topk", "carries_draft_hidden_states", "is_eagle"} <= set(methods)
    for name in methods:
        assert callable(getattr(ours, name))
        if name.startswith(("is_", "supports_", "has_", "need_", "carries_")):
            assert getattr(ours, name)() == getattr(stock, name)(), name


def test_registering_twice_changes_nothing():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algo.register()
    before = SpeculativeAlgorithm.from_string("C2T_EAGLE3")
    algo.register()
    assert SpeculativeAlgorithm.from_string("C2T_EAGLE3") is before


# --- options


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    args.add_cli_args(None, parser)
    return parser.parse_args(argv)


class Record:
    def __init__(self) -> None:
        self.seen = args.flags_of(self)


def test_options_reach_the_record_and_survive_pickling():
    made = args.from_cli_args(lambda namespace: Record(), parse("--speculative-c2t-beta", "0.3"))
    assert pickle.loads(pickle.dumps(made))._c2t == {"beta": "0.3"}
    assert made.seen == {"beta": "0.3"}, "SGLang 0.5.17 resolves inside the constructor"
    assert args.flags_of(Record()) is None, "nothing stays behind for the next record"


@pytest.mark.parametrize(
    ("given", "mode", "expected"),
    [
        ({}, "chain", 1),
        ({"page_size": 1}, "tree", 4),
        # with these SGLang takes another attention for a top-k of 1 than for none
        ({"page_size": 64}, "chain", None),
        ({"speculative_eagle_topk": 2}, "tree", 2),
        ({"speculative_algorithm": "EAGLE3"}, "chain", None),
        # which `validate` refuses
        ({}, "forest", None),
    ],
)
def test_topk_is_known_before_sglang_chooses_attention(given: dict[str, Any], mode: str, expected: int | None):
    fields = {"speculative_algorithm": "C2T", "speculative_eagle_topk": None, "page_size": None}
    namespace = argparse.Namespace(**(fields | given), speculative_c2t_mode=mode)
    seen = []
    args.from_cli_args(lambda namespace: seen.append(namespace.speculative_eagle_topk) or Record(), namespace)
    assert seen == [expected]


def test_a_record_made_by_a_program_reads_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("C2T_BETA", "0.7")
    assert args.config_of(Record()).beta == 0.7


# --- what resolution writes


def test_defaults_are_a_chain_of_the_default_steps(pair: types.SimpleNamespace):
    server_args = record(pair)
    validate.validate(server_args)
    assert server_args.speculative_algorithm == "C2T_STANDALONE"
    assert server_args.speculative_num_steps == validate.DEFAULT_STEPS
    assert server_args.speculative_eagle_topk == 1
    assert server_args.speculative_num_draft_tokens == validate.DEFAULT_STEPS + 1


def test_draft_length_is_the_users(pair: types.SimpleNamespace):
    server_args = record(pair, speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
    validate.validate(server_args)
    assert (server_args.speculative_num_steps, server_args.speculative_num_draft_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        ("LlamaForCausalLM", "STANDALONE"),
        ("LlamaForCausalLMEagle3", "EAGLE3"),
        ("LlamaForCausalLMEagle", "EAGLE"),
        ("DeepseekV3ForCausalLMNextN", "EAGLE"),
        ("Qwen3NextForCausalLMMTP", "EAGLE"),
    ],
)
def test_base_is_read_off_the_draft(tmp_path: Path, architecture: str, base: str):
    assert checkpoints.detect_base(str(checkpoint(tmp_path / "d", architecture))) == base


def test_a_target_that_carries_its_draft_is_eagle():
    assert checkpoints.detect_base(None) == "EAGLE"
    # MiMo's engine does not find the head by itself, so the target is named again as the draft
    assert checkpoints.detect_base("mimo", "mimo") == "EAGLE"


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling .* bias"),
        ({"speculative_use_block_verification": True}, "--speculative-use-block-verification"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"enable_lora": True}, r"--enable-lora .*lora_hook\.py:253"),
        ({"lora_paths": ["a=b"]}, "--lora-paths"),
        ({"pp_size": 2}, "--pp-size above 1"),
        ({"enable_two_batch_overlap": True}, r"--enable-two-batch-overlap .*two_batch_overlap\.py:72"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_attn_tp_input_scattered": True}, "--enable-attn-tp-input-scattered"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode .* a stand-alone draft"),
        (
            {"disaggregation_mode": "prefill", "speculative_algorithm": "C2T_EAGLE3", "_c2t": {"mode": "tree"}},
            "--disaggregation-mode prefill .* trees",
        ),
        ({"use_ray": True}, "--use-ray cannot be combined with C2T: .*/ray-actors.patch"),
        ({"watermark_config": "{}"}, "--watermark-config"),
        ({"cuda_graph_backend_prefill": "full"}, "--cuda-graph-backend-prefill full .* use breakable"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "--cuda-graph-backend-prefill full"),
        (
            {"cuda_graph_config": types.SimpleNamespace(prefill=types.SimpleNamespace(backend="full"))},
            "--cuda-graph-backend-prefill full",
        ),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk is 4"),
        ({"speculative_num_steps": 0}, "--speculative-num-steps is 0"),
        ({"speculative_num_steps": 4, "speculative_num_draft_tokens": 9}, "--speculative-num-draft-tokens is 9"),
        ({"speculative_algorithm": "C2T_EAGLE", "_c2t": {"base": "standalone"}}, "contradicts"),
        ({"speculative_draft_model_path": "no/such/place/at/all"}, "neither a directory here nor"),
    ],
)
def test_flags_that_cannot_work_with_c2t(pair: types.SimpleNamespace, changes: dict, message: str):
    server_args = record(pair, **changes)
    if "_c2t" in changes:
        with pytest.raises(SystemExit, match=message):
            validate.validate(server_args)
    else:
        with pytest.raises(C2TError, match=message):
            validate.validate(server_args)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"mode": "tree"}, "trees: .* use chains$"),
        ({}, {"beta": "0.3"}, "beta 0.3: .* let a planner choose, or set beta 0$"),
        ({}, {"planner": "off"}, "no planner: .* or set beta 0$"),
        ({"speculative_algorithm": "C2T"}, {}, r"a stand-alone draft: .*speculative_hook\.py:1078"),
        ({}, {"packing": "cpu"}, "--speculative-c2t-packing cpu: .* captured graph; leave it out$"),
        ({}, {"packing": "fa3", "rows": "sync"}, "--speculative-c2t-packing fa3: .* leave rows sync out"),
        ({}, {"packing": "fa3", "beta": "0"}, "--speculative-c2t-packing fa3: .* let a planner choose$"),
        ({}, {"learned": "learned.safetensors"}, "--speculative-c2t-learned learned.safetensors: ranks learn apart"),
        ({}, {"self_check": "strict"}, "--speculative-c2t-self-check strict: .* not tried"),
        ({"disaggregation_mode": "decode"}, {}, "--disaggregation-mode decode: "),
        ({"attn_cp_size": 2}, {}, "--attn-cp-size 2: .* not tried there"),
        ({"dcp_size": 2}, {}, "--dcp-size 2: "),
        ({"dwdp_size": 2}, {}, "--dwdp-size 2: "),
        ({"speculative_skip_dp_mlp_sync": True}, {}, "--speculative-skip-dp-mlp-sync: .* leave it out$"),
        ({"elastic_ep_backend": "mooncake"}, {}, "--elastic-ep-backend mooncake: ranks come and go"),
    ],
)
def test_what_cannot_be_had_with_dp_attention(
    pair: types.SimpleNamespace, changes: dict[str, Any], options: dict[str, Any], message: str
):
    given = {"speculative_algorithm": "C2T_EAGLE3", "attn_dp_size": 2, "_c2t": options, **changes}
    with pytest.raises(SystemExit, match=f"^C2T: DP attention cannot be combined with {message}") as error:
        validate.validate(record(pair, **given))
    assert "\n" not in str(error.value)
    validate.validate(record(pair, **given | {"attn_dp_size": 1, "_c2t": options | {"learned": None}}))


@pytest.mark.parametrize("name", ["SGLANG_SCHEDULER_SKIP_ALL_GATHER", "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"])
def test_variables_by_which_ranks_take_different_steps(
    pair: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv(name, "1")
    given = {"speculative_algorithm": "C2T_EAGLE3", "attn_dp_size": 2}
    with pytest.raises(ConfigError, match=f"^DP attention cannot be combined with {name}: .* unset it$"):
        validate.validate(record(pair, **given))


@pytest.mark.parametrize("spelled", [{"attn_dp_size": 2}, {"enable_dp_attention": True, "dp_size": 2}])
@pytest.mark.parametrize("options", [{}, {"beta": "0"}, {"packing": "full"}, {"packing": "fa3"}])
def test_dp_attention_as_either_release_spells_it(
    pair: types.SimpleNamespace, spelled: dict[str, Any], options: dict[str, Any]
):
    given = {"speculative_algorithm": "C2T_EAGLE3", **spelled}
    validate.validate(record(pair, **given, _c2t=options))
    with pytest.raises(SystemExit, match="DP attention cannot be combined with trees"):
        validate.validate(record(pair, **given, _c2t={"mode": "tree"}))


def test_replicas_would_write_one_file(pair: types.SimpleNamespace, tmp_path: Path):
    kept = {"learned": str(tmp_path / "learned.safetensors")}
    with pytest.raises(SystemExit, match=r"^C2T: --dp-size 2 cannot .* --speculative-c2t-learned") as error:
        validate.validate(record(pair, dp_size=2, _c2t=kept))
    assert "\n" not in str(error.value)
    validate.validate(record(pair, dp_size=1, _c2t=kept))
    validate.validate(record(pair, dp_size=2, _c2t={}))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_both_sides_of_a_disaggregated_server(pair: types.SimpleNamespace, mode: str):
    server_args = record(pair, disaggregation_mode=mode, speculative_algorithm="C2T_EAGLE3")
    validate.validate(server_args)
    assert server_args.speculative_num_draft_tokens == validate.DEFAULT_STEPS + 1


@pytest.mark.parametrize("beta", ["1.5", "-1", "nan", "much"])
def test_beta_from_the_command_line_ends_the_process_with_one_line(pair: types.SimpleNamespace, beta: str):
    with pytest.raises(SystemExit, match=r"^C2T: beta must be a number") as error:
        validate.validate(record(pair, _c2t={"beta": beta}))
    assert "\n" not in str(error.value)


def test_a_stand_alone_draft_of_another_vocabulary(pair: types.SimpleNamespace, tmp_path: Path):
    other = checkpoint(tmp_path / "other", "LlamaForCausalLM", vocab_size=65)
    with pytest.raises(ConfigError, match=r"vocabulary of 65, the target .* of 64"):
        validate.validate(record(pair, speculative_draft_model_path=str(other)))


@pytest.mark.parametrize("architecture", ["MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "GigaChat35ForCausalLM"])
def test_a_target_whose_heads_are_drafted_with_in_another_loop(
    pair: types.SimpleNamespace, tmp_path: Path, architecture: str
):
    target = checkpoint(tmp_path / "multi", architecture, vocab_size=64)
    with pytest.raises(ConfigError, match=rf"is a {architecture}, whose heads SGLang drafts with in another loop"):
        validate.validate(record(pair, model_path=str(target), speculative_draft_model_path=None))


def test_sglang_has_no_further_target_of_that_kind():
    from sglang.srt.arg_groups import model_overrides

    switched = r"@_register_for\(([^)]*)\)\n(?:(?!@_register_for).)*?multi_layer_eagle\"\] = True"
    named = set()
    for path in Path(model_overrides.__path__[0]).glob("*.py"):
        for registered in re.findall(switched, path.read_text(encoding="utf-8"), re.DOTALL):
            named |= set(re.findall(r'"(\w+)"', registered))
    assert named and {name for name in named if not name.endswith("NextN")} == set(checkpoints._MULTI_LAYER)


def test_another_top_m_than_the_classifiers(pair: types.SimpleNamespace):
    with pytest.raises(SystemExit, match=r"top_m is 10, but .* was fitted with 1000"):
        validate.validate(record(pair, _c2t={"top_m": "10"}))


def test_a_classifier_that_is_not_there(pair: types.SimpleNamespace, tmp_path: Path):
    with pytest.raises(SystemExit, match="neither a file nor a directory"):
        validate.validate(record(pair, _c2t={"classifier": str(tmp_path / "none.safetensors")}))


def test_a_damaged_classifier_beside_the_draft(pair: types.SimpleNamespace):
    (pair.draft / FILE_NAME).write_bytes(b"12345678")
    with pytest.raises(ClassifierError, match="not a readable safetensors file"):
        validate.validate(record(pair))


# --- which classifier


def test_named_then_beside_then_shipped(pair: types.SimpleNamespace, tmp_path: Path):
    from c2t_plugin.config import C2TConfig

    named = tmp_path / "named.safetensors"
    save_classifier(NodeClassifier(ClassifierSpec()), named)
    draft = str(pair.draft)
    assert find_classifier(C2TConfig(classifier=str(named)), "eagle3", draft) == (named, "named")
    assert find_classifier(C2TConfig(classifier=draft), "eagle3", None) == (pair.draft / FILE_NAME, "named")
    assert find_classifier(C2TConfig(), "eagle3", draft) == (pair.draft / FILE_NAME, "beside the draft")
    # who plans by probabilities gets them where there are some
    planned = functools.partial(find_classifier, C2TConfig(), "eagle3", probabilities=True)
    assert planned(draft) == (pair.draft / FILE_NAME, "beside the draft")
    calibrated = pair.draft / CALIBRATED_NAME
    save_classifier(NodeClassifier(ClassifierSpec()), calibrated)
    assert planned(draft) == (calibrated, "beside the draft")
    assert find_classifier(C2TConfig(), "eagle3", draft)[0] == pair.draft / FILE_NAME
    calibrated.unlink()
    (pair.draft / FILE_NAME).unlink()
    path, origin = planned(draft)
    assert (path.parent.name, path.name, origin) == ("eagle3", CALIBRATED_NAME, "shipped, generic")
    path, origin = find_classifier(C2TConfig(), "mtp", None, probabilities=True)
    assert (path.parent.name, path.name) == ("mtp", FILE_NAME)
    path, origin = find_classifier(C2TConfig(), "eagle3", draft)
    assert (path.parent.name, path.name, origin) == ("eagle3", FILE_NAME, "shipped, generic")


@pytest.mark.parametrize(
    ("base", "draft", "kind"),
    [
        ("EAGLE", None, "mtp"),
        ("EAGLE", "target", "mtp"),
        ("EAGLE", "head", "eagle"),
        ("EAGLE3", "head", "eagle3"),
        ("STANDALONE", "draft", "standalone"),
    ],
)
def test_a_draft_that_the_target_carries_has_the_mtp_heads_classifier(base: str, draft: str | None, kind: str):
    from c2t_plugin.config import C2TConfig

    assert classifier_kind(base, draft, "target") == kind
    path, origin = find_classifier(C2TConfig(), kind, None)
    folder = {"eagle": "eagle1", "standalone": "draft"}.get(kind, kind)
    assert (path.parent.name, origin) == (folder, "shipped, generic") and path.is_file()


# --- the cut


def test_cut_takes_out_the_link_behind_the_last_kept_token():
    from c2t_plugin.engines.sglang.verify.layout import cut_links

    links = torch.tensor([[1, 2, 3, -1]] * 4)
    cut_links(links, torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    assert links.tolist() == [[-1, 2, 3, -1], [1, -1, 3, -1], [1, 2, -1, -1], [1, 2, 3, -1]]
