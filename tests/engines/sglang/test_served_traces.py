"""Traces of a live server: the chosen requests' drafts as a simulation has them, and `c2t fit` on the files."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import load_classifier  # noqa: E402
from c2t_plugin.traces.file import Traces, load_traces  # noqa: E402
from c2t_plugin.traces.forest import Forest  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft, simulate  # noqa: E402

D_MAX = 4
SHARE = 0.5
REQUESTS = 16
# A server sums in another order than the simulation; float32 over some hundred terms.
TOLERANCE = 1e-3


def end_politely(server: CpuServer) -> None:
    """What an operator's SIGTERM does; waits until all of the server is gone."""
    assert server.process is not None
    # of a process that was started, as of one that was forked, SIGINT asks the server to end, by SIGTERM
    server.process.send_signal(signal.SIGINT)
    server.process.wait(120)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Requests of one server, half of them chosen, and what it left in the directory."""
    folder = tmp_path_factory.mktemp("traces")
    prompts = [ids[: 40 + 3 * i] for i, ids in enumerate(held_out_prompts(REQUESTS, min_tokens=96, seed=5))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    rids = [f"asked-{number}" for number in range(REQUESTS)]
    log, traces = folder / "server.log", folder / "served"
    options = {"C2T_TRACE_DIR": str(traces), "C2T_TRACE_SHARE": str(SHARE), "C2T_TRACE_PRECISION": "exact"}
    # The warm-up is a request like any other, with a random id.
    flags = ("--skip-server-warmup",)
    env = {**os.environ, **options}
    with vc.server(pair_dir(), "eagle3", D_MAX, classifier, log, *flags, env=env) as running:
        params = {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True}
        answers = running.request("/generate", {"input_ids": prompts, "rid": rids, "sampling_params": params})
        end_politely(running)
    return SimpleNamespace(prompts=prompts, rids=rids, answers=answers, directory=traces, classifier=classifier)


@pytest.fixture(scope="module")
def traces(recorded: SimpleNamespace) -> Traces:
    return load_traces(recorded.directory)


class Seen:
    """A keep_length that notes what the rule saw: statistics and tokens of every draft."""

    def __init__(self, rule: vc.Rule) -> None:
        self.rule, self.stats, self.tokens = rule, [], []

    def __call__(self, logits: torch.Tensor) -> int:
        log_probs = logits.double().log_softmax(-1).sort(descending=True).values
        largest = log_probs[:, : self.rule.spec["top_m"]]
        entropy = -(largest.exp() * largest).nan_to_num(0.0).sum(-1)
        joint = log_probs[:, 0].cumsum(0)
        self.stats.append(torch.stack([joint, log_probs[:, 0], entropy, log_probs[:, 0] - log_probs[:, 1]]))
        self.tokens.append(logits.argmax(-1).tolist())
        return self.rule.keep_length(logits)


def simulated(recorded: SimpleNamespace, target: Target, number: int) -> dict[int, tuple[torch.Tensor, list[bool]]]:
    """Statistics and labels by step, of the steps whose labels the text of the answer decides."""
    draft = load_draft(pair_dir(), vc.DRAFTS["eagle3"], target)
    seen = Seen(vc.Rule(recorded.classifier, vc.BETA))
    found = simulate(target, draft, recorded.prompts[number], vc.NEW_TOKENS, D_MAX, seen)
    text, step, states = found.output_ids, 0, {}
    for stats, tokens, accepted in zip(seen.stats, seen.tokens, found.accept_lengths, strict=True):
        after = text[step + 1 : step + 1 + D_MAX]
        hits = next((i for i, token in enumerate(after) if token != tokens[i]), len(after))
        if hits < len(after) or len(after) == D_MAX:
            states[step] = (stats, [depth < hits for depth in range(D_MAX)])
        step += accepted + 1
    return states


def test_the_chosen_requests_are_recorded_as_they_were_drafted(recorded: SimpleNamespace, traces: Traces):
    target = Target(pair_dir() / "target")
    # Nobody outside knows which are chosen, and they end in an order of their own: known by their first state.
    wanted = [simulated(recorded, target, number) for number in range(REQUESTS)]
    recorded_prompts = traces.prompt.unique().tolist()
    matched = set()
    for each in recorded_prompts:
        mine = traces[traces.prompt == each]
        number = min(range(REQUESTS), key=lambda number: distance(mine.chain, 0, wanted[number][0][0]))
        matched.add(number)
        rows = dict(zip(mine.step.tolist(), range(len(mine)), strict=True))
        assert set(wanted[number]) <= set(rows)
        assert len(rows) <= len(wanted[number]) + D_MAX
        for step, (stats, labels) in wanted[number].items():
            assert distance(mine.chain, rows[step], stats) < TOLERANCE
            assert mine.chain.accepted[rows[step]].tolist() == labels
    # each is chosen by a coin; that none is, or all are, happens once in 30,000 times
    assert 0 < len(matched) == len(recorded_prompts) < REQUESTS


def distance(chain: Forest, row: int, stats: torch.Tensor) -> float:
    """Of a recorded state's statistics, the largest difference to these, (4, d_max)."""
    found = torch.stack([chain.joint_log_prob[row], chain.log_prob[row], chain.entropy[row], chain.margin[row]])
    return float((found - stats).abs().max())


def test_no_word_of_a_request_is_in_the_files(recorded: SimpleNamespace, traces: Traces):
    assert traces.chain.token_ids.unique().tolist() == [-1]
    assert traces.header["prompts"] == "served"
    written = b"".join(path.read_bytes() for path in recorded.directory.iterdir())
    assert not any(rid.encode() in written for rid in recorded.rids)
    assert str(pair_dir()).encode() not in written


def test_cut_tokens_have_labels_too(recorded: SimpleNamespace, traces: Traces):
    """Some drafts were cut before their last accepted token: without those, a new classifier would never be bolder."""
    classifier = load_classifier(recorded.classifier)
    cut = classifier.confidence(traces.chain.stats()) < vc.BETA
    assert (cut & traces.chain.accepted).any()


def test_a_classifier_is_fitted_on_them(recorded: SimpleNamespace, tmp_path: Path):
    out = tmp_path / "new.safetensors"
    command = [sys.executable, "-m", "c2t_plugin.cli", "fit", str(recorded.directory), "--out", str(out)]
    done = subprocess.run([*command, "--d-max", "4", "--static", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spec = load_classifier(out).spec
    assert spec.pair["kind"] == "eagle3"
    assert spec.training["traces"]["prompts"] == "served"
    assert math.isfinite(spec.suggested_beta)
