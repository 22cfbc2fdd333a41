"""`c2t show`: the verdicts of a hand-made step, and the command on recorded trees."""

from __future__ import annotations

import html.parser
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.pairs.toy import pair_dir
from c2t_plugin import cli
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab.drawing import html_page, print_step
from c2t_plugin.lab.show import recorded_step
from c2t_plugin.lab.steps import ACCEPTED, CUT, MISSED, REJECTED, Step, recorded_paths, step_of
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces.file import Traces, save_traces
from c2t_plugin.traces.forest import Forest

# k = 2, two layers: 5 and 6 below the root; 7 and 8 below 6, 9 and 5 below 5. The target takes 6, then 8.
TOKENS = [5, 6, 7, 8, 9, 5]
OWNERS = [-1, 1, 0]
RUN = RunRecord("c2t show <t>", "0123abcd", True, {}, "a machine", None, "2026-01-02T03:04:05+00:00")
PROBS = [0.6, 0.3, 0.5, 0.4, 0.7, 0.1]


def by_hand() -> Forest:
    own = torch.tensor([PROBS]).log()
    parents = [-1, -1, 1, 1, 0, 0]
    joint = torch.tensor([[own[0, i] + (own[0, p] if p >= 0 else 0.0) for i, p in enumerate(parents)]])
    per_distribution = torch.tensor([[1.0, 2.0, 3.0]])
    return Forest(
        2,
        2,
        joint,
        own,
        per_distribution,
        per_distribution,
        torch.tensor([OWNERS], dtype=torch.int16),
        torch.tensor([TOKENS], dtype=torch.int32),
        torch.tensor([[False, True, False, True, False, False]]),
    )


@pytest.fixture
def step() -> Step:
    kept = {"wide": frozenset({(5,), (6,), (6, 8)}), "narrow": frozenset({(6,)}), "none": frozenset[tuple[int, ...]]()}
    return step_of("a step", [by_hand()], [torch.linspace(0, 1, 6)[None]], kept, d_max=2)


def test_paths_follow_the_owners():
    assert recorded_paths(by_hand()) == [(5,), (6,), (6, 7), (6, 8), (5, 9), (5, 5)]


def test_verdicts(step: Step):
    def verdicts(*path: int) -> list[str]:
        return list(step.nodes[path].verdicts.values())

    assert verdicts(5) == [REJECTED, CUT, CUT]
    assert verdicts(6) == [ACCEPTED, ACCEPTED, MISSED]
    assert verdicts(6, 8) == [ACCEPTED, MISSED, MISSED]
    assert verdicts(6, 7) == verdicts(5, 9) == [CUT, CUT, CUT]
    assert (step.gamma, step.tau) == ({"wide": 3, "narrow": 1, "none": 0}, {"wide": 2, "narrow": 1, "none": 0})


def test_numbers_of_a_node(step: Step):
    node = step.nodes[6, 8]
    assert (node.prob, node.joint_prob, node.entropy) == (pytest.approx(0.4), pytest.approx(0.12), 2.0)
    assert (node.depth, node.confidence) == (2, pytest.approx(0.6))


def test_the_walk_is_by_probability_and_ends_where_all_cut(step: Step):
    assert [node.path for node in step.walk(9)] == [(5,), (5, 9), (5, 5), (6,), (6, 7), (6, 8)]
    assert [node.path for node in step.walk(1)] == [(5,), (5, 9), (6,), (6, 7), (6, 8)]
    assert [node.path for node in step.walk(0)] == [(5,), (6,), (6, 8)]


def test_what_is_deeper_than_drafted_is_left_out():
    step = step_of("a step", [by_hand()], [torch.zeros(1, 6)], {"one": frozenset({(6,)})}, d_max=1)
    assert sorted(step.nodes) == [(5,), (6,)]
    assert step.tau == {"one": 1}


def test_a_node_that_was_not_recorded_is_an_error():
    with pytest.raises(C2TError, match=r"lacks the nodes \[\(4,\)\]"):
        step_of("a step", [by_hand()], [torch.zeros(1, 6)], {"odd": frozenset({(4,)})}, d_max=2)


def test_the_terminal_shows_every_node_once(step: Step, capsys: pytest.CaptureFixture[str]):
    print_step(step, lambda token: f"word{token}", 9, Console(width=160))
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "'word" in line]
    assert len(lines) == len(TOKENS)
    assert "✗·· 'word5'" in lines[0] and "✓✓! 'word6'" in text and "✓!! 'word8'" in text
    assert "wide" in text and "verified for nothing" in text


# p, P, H, depth and confidence of a node: what both drawings say behind its word
SAID = {
    (5,): "p 0.600  P 0.6  H 1.00  d 1  C 0.000",
    (6,): "p 0.300  P 0.3  H 1.00  d 1  C 0.200",
    (6, 7): "p 0.500  P 0.15  H 2.00  d 2  C 0.400",
    (6, 8): "p 0.400  P 0.12  H 2.00  d 2  C 0.600",
    (5, 9): "p 0.700  P 0.42  H 3.00  d 2  C 0.800",
    (5, 5): "p 0.100  P 0.06  H 3.00  d 2  C 1.000",
}


def test_every_drawn_node_has_its_numbers(step: Step, capsys: pytest.CaptureFixture[str]):
    print_step(step, lambda token: f"word{token}", 9, Console(width=160))
    lines = [line for line in capsys.readouterr().out.splitlines() if "'word" in line]
    page = html_page(step, lambda token: f"word{token}", 9, RUN)
    pieces = page.split("<li>")[1:]
    for node, line, piece in zip(step.walk(9), lines, pieces, strict=True):
        word = f"word{node.path[-1]}"
        assert word in line and line.rstrip().endswith(SAID[node.path])
        assert word in piece and f"<small>{SAID[node.path]}</small>" in piece


class Lists(html.parser.HTMLParser):
    """Checks that tags close in order, and collects each word with the depth of its list."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[int, str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "code":
            self.found.append((self.open.count("ul"), data))


def test_the_page_nests_as_the_tree_does_and_escapes_words(step: Step):
    page = html_page(step, lambda token: "<b>" if token == 9 else str(token), 9, RUN)
    lists = Lists()
    lists.feed(page)
    assert lists.open == []
    assert lists.found == [(1, "'5'"), (2, "'<b>'"), (2, "'5'"), (1, "'6'"), (2, "'7'"), (2, "'8'")]
    origin = "c2t show &lt;t&gt;; 0123abcd with uncommitted changes; a machine; 2026-01-02T03:04:05+00:00"
    assert f"<footer><small>{origin}</small></footer>" in page
    assert "'<b>'" not in page and "http" not in page and "<script" not in page


@pytest.fixture
def classifier() -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(ClassifierSpec(top_m=4, suggested_beta=0.3)).eval().requires_grad_(False)


@pytest.mark.parametrize("state", [0, 7, 19])
def test_every_policy_keeps_an_ancestor_closed_set(
    make_traces: Callable[..., Traces], classifier: NodeClassifier, state: int
):
    step = recorded_step(make_traces(), state, classifier, beta=0.4, d_max=3)
    assert len(step.gamma) == 4
    for policy in step.gamma:
        kept = {path for path, node in step.nodes.items() if node.verdicts[policy] in (ACCEPTED, REJECTED)}
        assert all(path[:-1] in kept for path in kept if len(path) > 1)
        assert len(kept) == step.gamma[policy]
    tree, eagle2 = (next(v for name, v in step.gamma.items() if start in name) for start in ("C2T tree", "EAGLE-2"))
    assert eagle2 == max(1, tree)


def test_presets_are_drawn_by_name(make_traces: Callable[..., Traces], classifier: NodeClassifier):
    traces = make_traces(k=4, layers=5)
    step = recorded_step(traces, 3, classifier, d_max=5, names=["chain-5", "dyjoint", "static-width", "naive-width"])
    # the toy has 6 words: not all of a fixed tree's places were recorded
    chain, stopped, fixed, naive = step.gamma
    assert (chain, stopped, naive) == ("chain-5", "dyjoint", "naive-width")
    assert fixed in ("static-width", "static-width (the record ends before it)")
    assert step.gamma[chain] == 5
    kept = {path for path, node in step.nodes.items() if node.verdicts[stopped] in (ACCEPTED, REJECTED)}
    # DyJoint's threshold is .08
    assert all(step.nodes[path].joint_prob >= 0.08 for path in kept) and len(kept) == step.gamma[stopped]
    greedy = [path for path, node in step.nodes.items() if node.verdicts[chain] in (ACCEPTED, REJECTED)]
    assert all(step.nodes[path].joint_prob < 0.08 for path in greedy if path not in kept)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nonsense", ConfigError, "no preset 'nonsense'; there are"),
        ("chain-5", ConfigError, "chain-5 drafts down to depth 5, 3 are drawn; give --d-max 5"),
        ("dyspec-64", C2TError, "run them live"),
        ("eagle2-100", C2TError, "collect with --k"),
    ],
)
def test_a_preset_that_cannot_be_drawn_is_refused(
    make_traces: Callable[..., Traces], classifier: NodeClassifier, name: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        recorded_step(make_traces(layers=5), 0, classifier, d_max=3, names=[name])


def test_bad_asks_are_refused(make_traces: Callable[..., Traces], classifier: NodeClassifier):
    traces = make_traces()
    with pytest.raises(C2TError, match="no state 20: the traces hold 20"):
        recorded_step(traces, 20, classifier)
    with pytest.raises(ConfigError, match=r"recorded depth \(4\), got 5"):
        recorded_step(traces, 0, classifier, d_max=5)
    with pytest.raises(C2TError, match="entropies sum over"):
        other = NodeClassifier(replace(classifier.spec, top_m=3)).eval()
        recorded_step(traces, 0, other, d_max=3)


def test_the_command_draws_and_writes_a_page(
    make_traces: Callable[..., Traces],
    classifier: NodeClassifier,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    save_traces(make_traces(), tmp_path / "some.traces")
    save_classifier(classifier, tmp_path / "c.safetensors")
    common = ["show", str(tmp_path / "some.traces"), "--classifier", str(tmp_path / "c.safetensors"), "--d-max", "3"]
    common += ["--pair", str(pair_dir())]
    assert cli.main(common) == 0
    assert "C2T tree, beta 0.3" in capsys.readouterr().out
    assert cli.main([*common, "--state", "3", "--html", str(tmp_path / "step.html")]) == 0
    page = (tmp_path / "step.html").read_text()
    assert "prompt 0, new token 3" in page and RunRecord.capture().commit in page
    chosen = ["--policy", "chain-4", "--policy", "dymax", "--d-max", "4", "--html", str(tmp_path / "chosen.html")]
    assert cli.main([*common, *chosen]) == 0
    page = (tmp_path / "chosen.html").read_text()
    assert "<td>chain-4</td>" in page and "<td>dymax</td>" in page and "EAGLE-2" not in page
    assert cli.main([*common, "--state", "99", "--html", str(tmp_path / "none.html")]) == cli.USAGE_ERROR
    assert "no state 99" in capsys.readouterr().err and not (tmp_path / "none.html").exists()


def test_words_are_those_of_the_shipped_pair():
    """Every id below the vocabulary has a word to show, bytes that are no character included."""
    from c2t_plugin.lab.pair_files import load_tokenizer

    tokenizer = load_tokenizer(pair_dir())
    size = json.loads((pair_dir() / "target" / "config.json").read_text())["vocab_size"]
    assert all(tokenizer.decode([token], skip_special_tokens=False) for token in range(size))
