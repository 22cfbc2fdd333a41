"""Requests recorded while vLLM serves them: every state is what the models say of the text up to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from c2t_plugin.classifier import load_classifier  # noqa: E402
from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.traces import Traces, load_traces  # noqa: E402
from tests.engines.sglang.simulate import Target  # noqa: E402
from tests.engines.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.engines.vllm.verify_counts import Oracle  # noqa: E402

NEW_TOKENS = 24
D_MAX = 4
BETA = 0.45
# float32 sums of another order, through a target and a draft
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def recorded(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    from vllm import SamplingParams

    folder = tmp_path_factory.mktemp("traces")
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    prompts = held_out_prompts(4, seed=9)
    options = {"c2t_classifier": str(classifier), "c2t_beta": BETA, "c2t_trace_dir": str(folder / "served")}
    with engine("c2t:eagle3", D_MAX, **options, c2t_trace_share=1.0) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        outputs = [list(output.outputs[0].token_ids) for output in found]
    return SimpleNamespace(prompts=prompts, outputs=outputs, directory=folder / "served", classifier=classifier)


@pytest.fixture(scope="module")
def traces(recorded: SimpleNamespace) -> Traces:
    return load_traces(recorded.directory)


def expected(recorded: SimpleNamespace, number: int) -> dict[int, tuple[torch.Tensor, list[bool]]]:
    """By step: joint log P, log P, entropy and margin [4, D_MAX] of the greedy chain, and what the text accepts."""
    target = Target(pair_dir() / "target")
    draft = Oracle(pair_dir(), target).draft("eagle3")
    top_m = load_classifier(recorded.classifier).spec.top_m
    prompt, output = recorded.prompts[number], recorded.outputs[number]
    found = {}
    for step in range(NEW_TOKENS - D_MAX):
        committed = [*prompt, *output[: step + 1]]
        _, states = target.run(committed)
        logits = draft.chain(committed, draft.features([state[:-1] for state in states]), D_MAX).double()
        log_probs = logits.log_softmax(-1).sort(descending=True).values
        entropy = torch.special.entr(log_probs[:, :top_m].exp()).sum(-1)
        own, margin = log_probs[:, 0], log_probs[:, 0] - log_probs[:, 1]
        matches = logits.argmax(-1) == torch.tensor(output[step + 1 : step + 1 + D_MAX])
        stats = torch.stack([own.cumsum(0), own, entropy, margin]).float()
        found[step] = stats, matches.int().cumprod(0).bool().tolist()
    return found


def test_states_are_the_models(recorded: SimpleNamespace, traces: Traces):
    assert len(traces.prompt.unique()) == len(recorded.prompts)
    unmatched = {int(each): traces[traces.prompt == each] for each in traces.prompt.unique()}
    seen = 0
    for number in range(len(recorded.prompts)):
        wanted = expected(recorded, number)
        # requests end in an order of their own: known by their first entropy
        key = min(unmatched, key=lambda each: abs(float(unmatched[each].chain.entropy[0, 0] - wanted[0][0][2, 0])))
        mine = unmatched.pop(key)
        assert mine.step[0] == 0, "a request's first draft is the one behind its first token"
        for row, step in enumerate(mine.step.tolist()):
            if step not in wanted:
                continue
            stats, labels = wanted[step]
            chain = mine.chain[torch.tensor([row])]
            found = torch.cat([chain.joint_log_prob, chain.log_prob, chain.entropy, chain.margin])
            assert (found - stats).abs().max() < TOLERANCE
            assert chain.accepted[0].tolist() == labels
            seen += 1
    assert seen > len(recorded.prompts) * NEW_TOKENS / (D_MAX + 1) / 2


def test_cut_tokens_have_labels_too(recorded: SimpleNamespace, traces: Traces):
    cut = load_classifier(recorded.classifier).confidence(traces.chain.stats()) < BETA
    assert (cut & traces.chain.accepted).any()


def test_no_word_of_a_request_is_in_the_files(recorded: SimpleNamespace, traces: Traces):
    assert traces.chain.token_ids.unique().tolist() == [-1]
    assert traces.header["pair"]["kind"] == "eagle3"
    assert not any(str(pair_dir()).encode() in path.read_bytes() for path in recorded.directory.iterdir())
