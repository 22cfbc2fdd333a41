"""Requests recorded while vLLM serves them: every state is what the models say of the text up to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import FILE_NAME, load_classifier  # noqa: E402
from c2t_plugin.engines.checkpoints import CLASSIFIERS  # noqa: E402
from c2t_plugin.engines.vllm import served  # noqa: E402
from c2t_plugin.traces.file import Traces, load_traces  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.support.vllm.recorded import Models, assert_states_are_the_models  # noqa: E402

NEW_TOKENS = 24
D_MAX = 4
BETA = 0.45


@pytest.fixture(scope="module")
def recorded(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    from vllm import SamplingParams

    folder = tmp_path_factory.mktemp("traces")
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    prompts = held_out_prompts(4, seed=9)
    options = {"c2t_classifier": str(classifier), "c2t_beta": BETA, "c2t_trace_dir": str(folder / "served")}
    options["c2t_trace_precision"] = "exact"
    with engine("c2t:eagle3", D_MAX, **options, c2t_trace_share=1.0) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        outputs = [list(output.outputs[0].token_ids) for output in found]
    return SimpleNamespace(prompts=prompts, outputs=outputs, directory=folder / "served", classifier=classifier)


@pytest.fixture(scope="module")
def traces(recorded: SimpleNamespace) -> Traces:
    return load_traces(recorded.directory)


def test_states_are_the_models(recorded: SimpleNamespace, traces: Traces):
    models = Models("eagle3", recorded.classifier, D_MAX)
    assert_states_are_the_models(traces, models, recorded.prompts, recorded.outputs)


def test_cut_tokens_have_labels_too(recorded: SimpleNamespace, traces: Traces):
    cut = load_classifier(recorded.classifier).confidence(traces.chain.stats()) < BETA
    assert (cut & traces.chain.accepted).any()


def test_no_word_of_a_request_is_in_the_files(recorded: SimpleNamespace, traces: Traces):
    assert traces.chain.token_ids.unique().tolist() == [-1]
    assert traces.header["pair"]["kind"] == "eagle3"
    assert not any(str(pair_dir()).encode() in path.read_bytes() for path in recorded.directory.iterdir())


@pytest.mark.parametrize(("draft", "revision"), [("someone/draft", "d1"), ("someone/target", "t1")])
def test_the_recorder_reads_the_draft_that_was_pinned(draft: str, revision: str, monkeypatch: pytest.MonkeyPatch):
    told = {}
    monkeypatch.setattr(served, "start_recorder", lambda *_, **named: told.update(named))
    settings = SimpleNamespace(
        trace_dir="traces",
        trace_share=1.0,
        trace_limit=1.0,
        trace_precision="coarse",
        base="eagle",
        classifier=CLASSIFIERS / "eagle1" / FILE_NAME,
    )
    spec = SimpleNamespace(model=draft, revision="d1", num_speculative_tokens=D_MAX)
    target = SimpleNamespace(model="someone/target", revision="t1")
    served.ServedTraces(settings, SimpleNamespace(speculative_config=spec, model_config=target), {})
    assert told["revision"] == revision
