"""`--speculative-c2t-planner` through real servers: a given cost curve decides exactly what a simulation says.

The simulation decides for all requests of a step together, as the server has to, so requests of one group are made to
start in the same step: they come in one call. How deep a step drafts follows from all steps before it, so the
simulation lives as long as the server. One file, because the simulation is of no use without the servers.
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import load_classifier  # noqa: E402
from c2t_plugin.planner.curve_file import read_curve, write_curve  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.planned_rule import CURVE, D_MAX, Plan  # noqa: E402
from tests.support.sglang.simulate import Draft, Target, load_draft  # noqa: E402

# Numbers of requests that start in one step. Of the last ones all but two end early.
GROUPS = (1, 1, 4, 8, 1, 8)
EARLY = 10
# Two choices whose output per second is so near that the rounding of sums decides.
UNDECIDED = 1e-5
# Measuring alone drafts too little for a first fit: where plain steps pay, the rest are probes.
ROUNDS, ASKED = 40, 4
# Seconds for a file that another thread writes.
WRITTEN_S = 60


def server(
    folder: Path, classifier: Path, curve: Path | str, name: str, *flags: str, base: str = "eagle3"
) -> CpuServer:
    """curve: a file, or `on`: one is measured, and kept in the folder, as is what is learnt."""
    # a simulation reads confidences as they are
    kept = ("calibrate", "--speculative-c2t-learned", str(folder / "learned.safetensors"))
    learning = kept if curve == "on" else ("off",)
    return CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", base),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS[base])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(classifier)),
        *("--speculative-c2t-planner", str(curve)),
        *("--disable-radix-cache", "--skip-server-warmup", "--speculative-c2t-request-tiers", "on"),
        *("--speculative-c2t-learn", *learning),
        # what is packed, at every depth that there is
        *("--speculative-c2t-self-check", "strict"),
        *flags,
        log=folder / f"{name}.log",
        env={**os.environ, "C2T_CACHE_DIR": str(folder / "cache")},
    )


@dataclass
class Request:
    """One request of the simulation; text is prompt and output. drafts: of each step where in the text it began, and
    all of its tokens."""

    prompt: list[int]
    text: list[int]
    new: int = vc.NEW_TOKENS
    lengths: list[int] = field(default_factory=list)
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    depths: Counter[int] = field(default_factory=Counter)
    dropped: int = 0

    @property
    def ended(self) -> bool:
        return len(self.text) - len(self.prompt) >= self.new

    def counts(self) -> vc.Counts:
        output = self.text[len(self.prompt) :][: self.new]
        lengths = Counter(self.lengths)
        return vc.Counts(tuple(output), len(self.lengths), tuple(sorted(lengths.items())))


def in_step(
    target: Target, draft: Draft, rule: vc.Rule, prompts: list[list[int]], new: list[int], plan: Plan
) -> tuple[list[Request], int]:
    """All requests decoded together, step by step, and the number of target rows needed. new: tokens of each."""
    requests = [
        Request(prompt, [*prompt, target.run(prompt)[0][-1]], own) for prompt, own in zip(prompts, new, strict=True)
    ]
    rows = 0
    while running := [request for request in requests if not request.ended]:
        depth = plan.depth(len(running))
        drafts = []
        for request in running:
            n = len(request.text) - 1
            features = draft.features([state[:n] for state in target.run(request.text)[1]])
            drafts.append(draft.chain(request.text, features, depth) if depth else torch.zeros(0, 1))
        chances = [list(rule.confidences(logits)) for logits in drafts]
        if depth and plan.ends:
            depth = plan.drafted(chances)
            drafts = [logits[:depth] for logits in drafts]
        kept = plan.keep([row[:depth] for row in chances]) if depth else [0] * len(running)
        rows += sum(kept) + len(kept)
        for request, logits, length in zip(running, drafts, kept, strict=True):
            whole, n = logits.argmax(-1).tolist(), len(request.text) - 1
            drafted = whole[:length]
            choices, _ = target.run([*request.text, *drafted])
            hits = next((i for i in range(length) if drafted[i] != choices[n + i]), length)
            request.text += [*drafted[:hits], choices[n + hits]]
            request.lengths.append(length)
            request.drafts.append((n + 1, whole))
            request.depths[depth] += 1
            request.dropped += depth - length
    return requests, rows


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("planner")
    target = Target(pair_dir() / "target")
    prompts = [ids[: 30 + 6 * i] for i, ids in enumerate(held_out_prompts(8, min_tokens=96, seed=21))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    return SimpleNamespace(
        folder=folder,
        target=target,
        drafts={base: load_draft(pair_dir(), vc.DRAFTS[base], target) for base in ("eagle3", "standalone")},
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=classifier,
        rule=vc.Rule(classifier, 0.0),
    )


def state(running: CpuServer) -> dict[str, Any]:
    return running.request("/get_server_info")["internal_states"][0]["c2t"]


def together(running: CpuServer, prompts: list[list[int]], new: list[int] | None = None) -> list[dict[str, Any]]:
    """Answers to requests that all start in one step: token ids of one call reach the scheduler in one message. new:
    tokens of each."""
    params = [
        {"temperature": 0.0, "max_new_tokens": own, "ignore_eos": True} for own in new or [vc.NEW_TOKENS] * len(prompts)
    ]
    found: list[dict[str, Any]] = running.request("/generate", {"input_ids": prompts, "sampling_params": params})
    return found


def groups(prompts: list[list[int]]) -> list[list[list[int]]]:
    return [prompts[:size] if size > 1 else [prompts[i]] for i, size in enumerate(GROUPS)]


def served_as_simulated(running: CpuServer, setting: SimpleNamespace, base: str, *, packed: bool) -> Plan:
    """Every group as simulated: texts, verify steps, how many drafts of each were verified, steps and their depths."""
    plan = Plan(packed, ends=True, skips=True)
    for at, group in enumerate(groups(setting.prompts)):
        before, decided = state(running), len(plan.depths)
        new = [vc.NEW_TOKENS] * len(group)
        if at == len(GROUPS) - 1:
            new[:-2] = [EARLY] * (len(group) - 2)
        answers = together(running, group, new)
        found = [vc.Counts.of_answer(answer) for answer in answers]
        expected, rows = in_step(setting.target, setting.drafts[base], setting.rule, group, new, plan)
        after = state(running)
        plain = [setting.plain[setting.prompts.index(prompt)] for prompt in group]
        assert [each.output_ids for each in found] == [whole[:own] for whole, own in zip(plain, new, strict=True)]
        assert found == [request.counts() for request in expected]
        for answer, request in zip(answers, expected, strict=True):
            (told,) = answer["meta_info"]["c2t"]
            assert told["depths"] == {str(depth): request.depths[depth] for depth in sorted(request.depths)}
            # beta is 0: the budget drops all that is
            assert told["clipped"] == told["over_budget"] == request.dropped
        assert after["over_budget"] - before["over_budget"] == sum(request.dropped for request in expected)
        assert after["steps"] - before["steps"] == len(plan.depths) - decided
        if not packed:
            assert after["rows_computed"] - before["rows_computed"] == rows
    assert plan.margin > UNDECIDED, "a decision is too near to call: choose other prompts"
    # of the two that are left a draft has plain steps to catch up with
    last = plan.depths[decided:]
    assert 0 in last and last[-1] > 0 and sum(last[last.index(0) :]) > 0
    return plan


@pytest.fixture(scope="module")
def planned(setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    curve = setting.folder / "given.json"
    write_curve(CURVE, curve)
    with server(setting.folder, setting.classifier, curve, "given") as running:
        yield SimpleNamespace(
            server=running, curve=curve, plan=served_as_simulated(running, setting, "eagle3", packed=True)
        )


def test_each_step_drafts_and_verifies_as_simulated(planned: SimpleNamespace):
    """That it does is asserted where it is served; here, that there was something to decide."""
    chosen = planned.plan.depths
    assert chosen[0] == D_MAX
    # drafting ends at eight requests, and has come back for the last one alone
    assert {0, D_MAX} < set(chosen)
    assert chosen[-1] > 0
    assert state(planned.server)["depths"]["0"] == chosen.count(0)


def test_where_the_window_is_computed_whole_it_is_as_wide_as_the_draft_is_deep(setting: SimpleNamespace):
    curve = setting.folder / "uniform.json"
    write_curve(CURVE, curve)
    options = {"base": "standalone"}
    with server(
        setting.folder, setting.classifier, curve, "uniform", "--speculative-c2t-packing", "off", **options
    ) as one:
        plan = served_as_simulated(one, setting, "standalone", packed=False)
    assert {0, D_MAX} < set(plan.depths)


def test_a_stream_ends_with_the_planners_choices(setting: SimpleNamespace, planned: SimpleNamespace):
    params = {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": setting.prompts[0], "sampling_params": params, "stream": True}
    asked = urllib.request.Request(
        f"{planned.server.base_url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        metas = [json.loads(line[6:])["meta_info"] for line in answer if line.startswith(b"data: {")]
    assert len(metas) > 1 and not any(meta.get("c2t") for meta in metas[:-1])
    (told,) = metas[-1]["c2t"]
    assert sum(told["depths"].values()) == sum(told["tiers"].values()) == metas[-1]["spec_verify_ct"]


def test_a_given_curve_is_left_as_it_is(planned: SimpleNamespace):
    found = state(planned.server)
    assert found["beta"] == "auto"
    assert found["planner"]["active"] and found["planner"]["curve"]
    assert read_curve(planned.curve) == CURVE


def test_single_requests_keep_their_own_rules(setting: SimpleNamespace, planned: SimpleNamespace):
    """Those with a threshold of their own among themselves, which draft whole chains; then beside others."""
    oracle = vc.Oracle(pair_dir(), setting.target)
    alone = asked_for(planned, setting, [{"enabled": False}, {"beta": 0.9}])
    assert alone[0] == oracle.counts("eagle3", setting.prompts[0], D_MAX, None)
    assert alone[1] == oracle.counts("eagle3", setting.prompts[1], D_MAX, setting.classifier, 0.9)
    found = asked_for(planned, setting, [{"enabled": False}, {"beta": 0.9}, {"max_depth": 1}, {"max_depth": 0}])
    assert {length for length, _ in found[2].draft_lengths} <= {0, 1}
    assert found[3].draft_lengths == ((0, vc.NEW_TOKENS - 1),)


def asked_for(planned: SimpleNamespace, setting: SimpleNamespace, own: list[dict[str, Any]]) -> list[vc.Counts]:
    params = [
        {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True, "custom_params": {"c2t": each}}
        for each in own
    ]
    body = {"input_ids": setting.prompts[: len(own)], "sampling_params": params}
    found = [vc.Counts.of_answer(answer) for answer in planned.server.request("/generate", body)]
    assert [each.output_ids for each in found] == setting.plain[: len(own)]
    return found


def test_a_fixed_beta_ends_it_and_auto_returns_to_it(setting: SimpleNamespace, planned: SimpleNamespace):
    oracle = vc.Oracle(pair_dir(), setting.target)
    vc.control(planned.server, beta=vc.BETA)
    try:
        assert state(planned.server)["planner"]["active"] is False
        answer = planned.server.generate(setting.prompts[0], max_new_tokens=vc.NEW_TOKENS, ignore_eos=True)
        expected = oracle.counts("eagle3", setting.prompts[0], D_MAX, setting.classifier)
        assert vc.Counts.of_answer(answer) == expected
        refused = {"server_args": {"speculative_c2t_auto": 1, "speculative_c2t_beta": 0.5}}
        assert planned.server.request("/set_internal_state", refused) == [False]
    finally:
        vc.control(planned.server, auto=1)
    assert state(planned.server)["beta"] == "auto"


def asked_until_learnt(running: CpuServer, setting: SimpleNamespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Answers, one request at a time, and what the server says when it has learnt, or ROUNDS are over."""
    answers: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        found = vc.answers(running, setting.prompts[:ASKED], concurrency=1)
        assert [tuple(answer["output_ids"]) for answer in found] == setting.plain[:ASKED]
        answers += found
        told = state(running)
        if number and told["planner"]["learnt"]["slope"] != 1.0:
            break
    return answers, told


def test_without_a_curve_one_is_measured_and_the_next_server_begins_with_it(setting: SimpleNamespace):
    with server(setting.folder, setting.classifier, "on", "measured") as running:
        untaught = {"slope": 1.0, "own": 0.0, "offsets": [0.0] * D_MAX}
        learnt = {"seen": 0, "discarded": 0, "turns": 0, "nll": None, "auc": None, **untaught}
        nothing = {"step_seconds": {}, "came": {"tokens": None, "seconds": None}}
        untried = {"active": True, "curve": False, "depth": D_MAX, "learnt": learnt, **nothing, "unscored": None}
        found = state(running)["planner"]
        assert not any(each["tokens"] for each in found["learnt"].pop("depths"))
        assert found["learnt"].pop("joint")["slope"] == 1.0
        assert found == untried
        found, told = asked_until_learnt(running, setting)
        planner = told["planner"]
        assert planner["curve"]
        # every verified token taught it something, and one that was cut where the text came so far, but those behind
        # the end of a text, of one that had its share, and of drafts without scores, if it came to any
        verified = sum(n * chains for n, chains in enumerate(told["verified"]))
        assert 0 < planner["learnt"]["seen"] <= sum(int(depth) * steps for depth, steps in told["depths"].items())
        if not planner["unscored"]:
            assert verified - len(found) * D_MAX <= planner["learnt"]["seen"]
        assert planner["learnt"]["slope"] != 1.0
        # toy confidences promise too much or too little, but not tenfold
        assert 0.1 < planner["came"]["tokens"] < 10
        assert planner["came"]["seconds"] > 0
        # of one request at a time, each depth that was measured or drafted since
        assert set(planner["step_seconds"]) == {"1"}
        assert {str(D_MAX), "0"} <= set(planner["step_seconds"]["1"])
        assert all(math.isfinite(nats) for nats in planner["learnt"]["nll"])
        lengths = {length for answer in found for length, _ in vc.Counts.of_answer(answer).draft_lengths}
        # what it learnt first it writes at once; the file is there when it is whole
        deadline = time.monotonic() + WRITTEN_S
        while not (setting.folder / "learned.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        log = running.log.read_text(errors="replace")
    kept = load_classifier(setting.folder / "learned.safetensors").spec
    assert 0 < kept.training["learned"]["seen"] <= planner["learnt"]["seen"]
    assert kept.pair["target"].startswith("LlamaForCausalLM sha256:")
    assert "C2T: learnt from" in log
    assert lengths <= set(range(D_MAX + 1))
    assert "C2T: cost of a step, measured" in log
    assert "c2t calibrate" not in log
    (cached,) = (setting.folder / "cache").rglob("*.json")
    # the next one begins with it, and what it measures is nothing
    before = cached.read_bytes()
    proved = ("--speculative-c2t-self-check", "off")
    with server(setting.folder, setting.classifier, "on", "again", *proved) as running:
        assert state(running)["planner"]["curve"]
        assert vc.answers(running, setting.prompts[:1], concurrency=1)[0]["output_ids"] == list(setting.plain[0])
        log = running.log.read_text(errors="replace")
    assert f"as it was measured before ({cached})" in log and "C2T: cost of a step, measured" not in log
    assert cached.read_bytes() == before
