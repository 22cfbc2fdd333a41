"""`c2t show`: draw one recorded decoding step, with what each policy kept, cut and missed, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.output import check_file, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from c2t_plugin.classifier import NodeClassifier
    from c2t_plugin.lab.grow import TreePolicy
    from c2t_plugin.lab.steps import Path as TokenPath
    from c2t_plugin.lab.steps import Step
    from c2t_plugin.traces.file import Traces
    from c2t_plugin.traces.forest import Forest

D_MAX = 6
CHAIN = 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t show", description=__doc__)
    parser.add_argument("traces", type=Path, help="trace file of `c2t collect`")
    parser.add_argument("--state", type=int, default=0, help="which recorded state, from 0 (default: 0)")
    parser.add_argument("--classifier", type=Path, help="classifier file (default: the one beside the pair's draft)")
    parser.add_argument("--beta", type=float, help="its threshold (default: the one the file suggests)")
    parser.add_argument("--d-max", type=int, default=D_MAX, help=f"deepest node drafted (default: {D_MAX})")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="a preset of c2t_plugin.lab.policies.presets, in place of the usual four; repeatable",
    )
    parser.add_argument("--pair", type=Path, help="pair directory, for the tokens (default: C2T_PAIR)")
    parser.add_argument(
        "--cut", type=int, default=2, help="cut nodes to show beside kept ones, per parent (default: 2)"
    )
    parser.add_argument("--html", type=Path, help="write a page instead of drawing on the terminal")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.html:
        check_file(arguments.html)
    from rich.console import Console

    from c2t_plugin.classifier import FILE_NAME, load_classifier
    from c2t_plugin.lab.drawing import html_page, print_step
    from c2t_plugin.lab.pair_files import load_tokenizer, pair_dir
    from c2t_plugin.provenance import RunRecord
    from c2t_plugin.traces.file import load_traces

    traces = load_traces(arguments.traces)
    directory = arguments.pair or pair_dir()
    path = arguments.classifier or directory / traces.header["pair"].get("kind", "") / FILE_NAME
    classifier = load_classifier(path)
    step = recorded_step(traces, arguments.state, classifier, arguments.beta, arguments.d_max, arguments.policy)
    tokenizer = load_tokenizer(directory)

    def token_text(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    if arguments.html is None:
        print_step(step, token_text, arguments.cut, Console())
        return 0
    write_text(arguments.html, html_page(step, token_text, arguments.cut, RunRecord.capture()))
    print(arguments.html)
    return 0


def recorded_step(
    traces: Traces,
    state: int,
    classifier: NodeClassifier,
    beta: float | None = None,
    d_max: int = D_MAX,
    names: Sequence[str] = (),
) -> Step:
    """One state under a static chain, C2T's chain, C2T's tree, and of its size EAGLE-2's tree; or under named presets.

    beta: of the usual four; presets have their own. Raises C2TError for a state that there is not, another top-M, or
    a preset that no record can serve; ConfigError for d_max deeper than the record, or a preset deeper than d_max.
    """
    import torch

    from c2t_plugin.lab.steps import step_of

    if not 0 <= state < len(traces):
        raise C2TError(f"there is no state {state}: the traces hold {len(traces)}, counted from 0")
    if not 1 <= d_max <= traces.chain.layers:
        raise ConfigError(f"d-max must be between 1 and the recorded depth ({traces.chain.layers}), got {d_max}")
    one = traces[torch.tensor([state])]
    beta = classifier.spec.suggested_beta if beta is None else beta
    found = _named(one, names, classifier, d_max) if names else _usual(one, classifier, beta, d_max)
    confidences = [classifier.confidence(forest.stats()) for forest in (one.tree, one.chain)]
    title = f"{traces.header['pair'].get('kind', 'draft')}: prompt {int(one.prompt)}, new token {int(one.step)}"
    return step_of(title, (one.tree, one.chain), confidences, found, d_max)


def _usual(one: Traces, classifier: NodeClassifier, beta: float, d_max: int) -> dict[str, frozenset[TokenPath]]:
    """What four policies keep of one state."""
    from c2t_plugin.lab.policies.c2t import C2TTree
    from c2t_plugin.lab.policies.chains import C2TChain, StaticChain
    from c2t_plugin.lab.policies.eagle2 import Eagle2
    from c2t_plugin.lab.replay import replay_trees
    from c2t_plugin.lab.steps import kept_paths

    top_m, k = one.header["top_m"], one.tree.k

    def kept(forest: Forest, policy: TreePolicy) -> frozenset[TokenPath]:
        return kept_paths(replay_trees(forest, policy, top_m).tree)

    tree = C2TTree(classifier=classifier, beta=beta, first_k=k, second_k=k, d_max=d_max)
    chain = C2TChain(classifier=classifier, beta=beta, d_max=d_max)
    length = min(CHAIN, d_max)
    found = {
        f"static chain of {length}": kept(one.chain, StaticChain(d_max=length, top_m=top_m)),
        f"C2T chain, beta {beta:g}": kept(one.chain, chain),
        f"C2T tree, beta {beta:g}": kept(one.tree, tree),
    }
    size = max(1, len(found[f"C2T tree, beta {beta:g}"]))
    found[f"EAGLE-2 tree of {size}"] = kept(one.tree, Eagle2(max_nodes=size, k=k, d_max=d_max, top_m=top_m))
    return found


def _named(
    one: Traces, names: Sequence[str], classifier: NodeClassifier, d_max: int
) -> dict[str, frozenset[TokenPath]]:
    """What the presets of these names keep of one state."""
    from c2t_plugin.lab.policies.chains import StaticChain, StoppingChain
    from c2t_plugin.lab.policies.presets import preset
    from c2t_plugin.lab.replay import replay_trees
    from c2t_plugin.lab.steps import kept_paths

    top_m, found = one.header["top_m"], {}
    for name in names:
        chosen = preset(name)
        policy = chosen.policy(classifier) if chosen.needs_classifier else chosen.policy(top_m=top_m)
        forest = one.chain if isinstance(policy, StaticChain | StoppingChain) else one.tree
        replayed = replay_trees(forest, policy, top_m, one.header["pair"].get("draft_vocab_size"))
        tree = replayed.tree
        deepest = int((tree.depths * tree.alive).max()) if tree.nodes else 0
        if deepest > d_max:
            raise ConfigError(f"{name} drafts down to depth {deepest}, {d_max} are drawn; give --d-max {deepest}")
        ended = " (the record ends before it)" if replayed.missing.any() else ""
        found[name + ended] = kept_paths(tree)
    return found
