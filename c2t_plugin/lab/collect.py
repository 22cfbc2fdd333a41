"""`c2t collect`: grow whole draft trees at the decoding states of a pair and write them, labelled, to a trace file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.plans import DRAFTS, PROMPT_SOURCES, CollectPlan, TreeShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import LlamaForCausalLM

    from c2t_plugin.forest import Forest
    from c2t_plugin.grow import TreePolicy
    from c2t_plugin.lab.drafts import BatchDraft, DraftModel
    from c2t_plugin.lab.replay import Outcomes
    from c2t_plugin.lab.texts import Prompt, Texts
    from c2t_plugin.traces import Traces

# About 1,600 distributions at a time: their logits stay near the cache, and matrix products are large enough.
TEXTS_PER_BATCH = 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t collect", description=__doc__)
    parser.add_argument("--pair", type=Path, help="pair directory (default: C2T_PAIR, else the shipped one)")
    parser.add_argument("--draft", choices=DRAFTS, required=True, help="which of its drafts")
    parser.add_argument("--out", type=Path, required=True, help="trace file to write")
    parser.add_argument("--trees", type=int, default=CollectPlan.trees, help="at least so many; prompts are used whole")
    parser.add_argument("--k", type=int, default=TreeShape.k, help="children per expanded node, expanded per layer")
    parser.add_argument("--layers", type=int, default=TreeShape.layers, help="depth; a root's child has depth 1")
    parser.add_argument("--top-m", type=int, default=TreeShape.top_m, help="probabilities that the entropy sums over")
    parser.add_argument(
        "--prompts", choices=PROMPT_SOURCES, default=CollectPlan.prompts, help="text that they come from"
    )
    parser.add_argument("--new-tokens", type=int, default=CollectPlan.new_tokens, help="trees per prompt, one a token")
    parser.add_argument("--seed", type=int, default=CollectPlan.seed, help="choice of prompts")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    plan = CollectPlan(
        draft=arguments.draft,
        shape=TreeShape(arguments.k, arguments.layers, arguments.top_m),
        trees=arguments.trees,
        prompts=arguments.prompts,
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
    )
    from c2t_plugin.pair import pair_dir
    from c2t_plugin.traces import save_traces

    traces = collect(arguments.pair or pair_dir(), plan)
    save_traces(traces, arguments.out)
    per_tree, per_chain = (forest.accepted.sum(1).float().mean() for forest in (traces.tree, traces.chain))
    print(
        f"{arguments.out}: {len(traces)} trees of {1 + traces.tree.accepted.shape[1]} nodes, root included; "
        f"accepted per tree {per_tree:.3f}, per chain of {plan.shape.layers} {per_chain:.3f}; "
        f"{traces.novel.float().mean():.1%} of the states novel"
    )
    return 0


def collect(directory: Path, plan: CollectPlan) -> Traces:
    """Trees and chains of one draft of a pair directory, with a progress bar."""
    import torch

    from c2t_plugin.forest import join
    from c2t_plugin.lab.pairs import describe_pair, load_pair
    from c2t_plugin.lab.texts import end_of_text
    from c2t_plugin.provenance import RunRecord
    from c2t_plugin.traces import Traces

    target, draft = load_pair(directory, plan.draft)
    trees, chains, prompt, step, novel, group = [], [], [], [], [], []
    pool = _pool(directory, plan)
    sources = {source: number for number, source in enumerate(dict.fromkeys(each.source for each in pool))}
    groups = torch.tensor([sources[each.source] for each in pool])
    for texts in _texts(target, pool, plan):
        tree, chain = grow_both(target, draft, texts, plan.shape)
        keep = texts.running(end_of_text(target))
        trees.append(tree[keep])
        chains.append(chain[keep])
        prompt.append(texts.numbers.repeat_interleave(len(texts.roots))[keep].int())
        group.append(groups[prompt[-1]].int())
        step.append(torch.arange(len(texts.roots)).repeat(len(texts.numbers))[keep].short())
        novel.append(texts.novel()[keep])
    header = {
        "pair": describe_pair(directory, plan.draft),
        "top_m": plan.shape.top_m,
        "prompts": plan.prompts,
        "new_tokens": plan.new_tokens,
        "run": RunRecord.capture(seed=plan.seed).to_json(),
    }
    joined = join(trees), join(chains), torch.cat(prompt), torch.cat(step), torch.cat(novel)
    return Traces(*joined, header, torch.cat(group))


def run_live(
    directory: Path, plan: CollectPlan, policies: Mapping[str, TreePolicy]
) -> tuple[Tensor, dict[str, Outcomes]]:
    """What policies do, drafting live, at the very states that collect() records with this plan, with a progress bar.

    For rules that ask for what no record holds: fixed shapes, wide layers, sampled tokens. The target is greedy.
    plan.shape.layers bounds the depth of their trees; its k and top_m are not used.
    Returns the prompt number of each state, (states,) int32, as replay.serve takes it, and the outcomes by name.
    """
    import torch

    from c2t_plugin.lab.pairs import load_pair
    from c2t_plugin.lab.replay import concatenate, grow_live
    from c2t_plugin.lab.texts import end_of_text

    target, model = load_pair(directory, plan.draft)
    # one each, so that what one policy draws does not depend on the others
    generators = {name: torch.Generator().manual_seed(plan.seed) for name in policies}
    prompt: list[Tensor] = []
    found: dict[str, list[Outcomes]] = {name: [] for name in policies}
    for texts in _texts(target, _pool(directory, plan), plan):
        keep = texts.running(end_of_text(target))
        prompt.append(texts.numbers.repeat_interleave(len(texts.roots))[keep].int())
        with torch.inference_mode():
            batch, continuation = _read(target, model, texts), texts.continuation(plan.shape.layers)
            for name, policy in policies.items():
                grown = grow_live(batch.start(plan.shape.layers), policy, continuation, generators[name])
                found[name].append(grown.outcomes()[keep])
    return torch.cat(prompt), {name: concatenate(parts) for name, parts in found.items()}


def grow_both(target: LlamaForCausalLM, model: DraftModel, texts: Texts, shape: TreeShape) -> tuple[Forest, Forest]:
    """Whole trees and greedy chains at all states of some texts."""
    import torch

    from c2t_plugin.lab.trees import grow

    chains = TreeShape(1, shape.layers, shape.top_m)
    with torch.inference_mode():
        batch, continuation = _read(target, model, texts), texts.continuation(shape.layers)
        tree, chain = (grow(batch.start(shape.layers), continuation, each) for each in (shape, chains))
    return tree, chain


def _read(target: LlamaForCausalLM, model: DraftModel, texts: Texts) -> BatchDraft:
    """The draft at all states of some texts."""
    from c2t_plugin.lab.drafts import BatchDraft
    from c2t_plugin.pair.models import hidden_states

    return BatchDraft(model, texts.token_ids, hidden_states(target, texts.token_ids[:, : texts.roots[-1]]), texts.roots)


def _pool(directory: Path, plan: CollectPlan) -> list[Prompt]:
    """The prompts that a plan may use; a prompt's number is its place."""
    from c2t_plugin.lab.corpora import SOURCES

    return SOURCES[plan.prompts](directory, -(-plan.trees // plan.new_tokens), plan.seed)


def _texts(target: LlamaForCausalLM, pool: Sequence[Prompt], plan: CollectPlan) -> Iterator[Texts]:
    """Greedy texts of as many prompts of the pool as the trees need, with a progress bar.

    Where the target ends its text early a prompt gives fewer trees; then further prompts follow.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from c2t_plugin.lab.texts import end_of_text, greedy_texts

    used = found = 0
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        bar = progress.add_task(f"{plan.draft} trees", total=plan.trees)
        while found < plan.trees:
            if used == len(pool):
                raise C2TError(f"{used} prompts gave only {found} of {plan.trees} trees; ask for fewer")
            batch = range(used, min(len(pool), used - (found - plan.trees) // plan.new_tokens))
            prompts = {number: pool[number].token_ids for number in batch}
            for texts in greedy_texts(target, prompts, plan.new_tokens, plan.shape.layers, TEXTS_PER_BATCH):
                yield texts
                found += int(texts.running(end_of_text(target)).sum())
                progress.update(bar, completed=found)
            used = batch.stop
