"""`c2t collect`: grow whole draft trees at the decoding states of a pair and write them, labelled, to a trace file."""

from __future__ import annotations

import argparse
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.plans import DRAFTS, PROMPT_FILE, PROMPT_SOURCES, CollectPlan, TreeShape
from c2t_plugin.output import check_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Sized

    from torch import Tensor
    from transformers import PreTrainedModel

    from c2t_plugin.lab.drafts import DraftModel
    from c2t_plugin.lab.grow import TreePolicy
    from c2t_plugin.lab.replay import Outcomes
    from c2t_plugin.lab.texts import Prompt, Texts
    from c2t_plugin.lab.unfinished import Unfinished
    from c2t_plugin.traces.file import Traces
    from c2t_plugin.traces.forest import Forest

# About 1,600 distributions over the shipped pair's tokens at a time: their logits stay near the cache, and matrix
# products are large enough.
TEXTS_PER_BATCH = 4
WORDS_PER_BATCH = TEXTS_PER_BATCH * 4096


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t collect", description=__doc__)
    parser.add_argument("--pair", type=Path, help="pair directory: target/ and a folder per draft (default: C2T_PAIR)")
    parser.add_argument("--draft", choices=DRAFTS, required=True, help="which of its drafts")
    parser.add_argument("--out", type=Path, required=True, help="trace file to write")
    parser.add_argument("--trees", type=int, default=CollectPlan.trees, help="at least so many; prompts are used whole")
    parser.add_argument("--k", type=int, default=TreeShape.k, help="children per expanded node, expanded per layer")
    parser.add_argument("--layers", type=int, default=TreeShape.layers, help="depth; a root's child has depth 1")
    parser.add_argument("--top-m", type=int, default=TreeShape.top_m, help="probabilities that the entropy sums over")
    parser.add_argument(
        "--prompts",
        default=CollectPlan.prompts,
        metavar="KIND|FILE",
        help=f"text that they come from: {', '.join(PROMPT_SOURCES)}, or a file of JSON lines with a `text` each",
    )
    parser.add_argument("--new-tokens", type=int, default=CollectPlan.new_tokens, help="trees per prompt, one a token")
    parser.add_argument("--seed", type=int, default=CollectPlan.seed, help="choice of prompts")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    check_file(arguments.out)
    plan = CollectPlan(
        draft=arguments.draft,
        shape=TreeShape(arguments.k, arguments.layers, arguments.top_m),
        trees=arguments.trees,
        prompts=arguments.prompts,
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
    )
    from c2t_plugin.lab.pair_files import pair_dir

    traces = collect_to(arguments.out, arguments.pair or pair_dir(), plan)
    per_tree, per_chain = (forest.accepted.sum(1).float().mean() for forest in (traces.tree, traces.chain))
    print(
        f"{arguments.out}: {len(traces)} trees of {1 + traces.tree.accepted.shape[1]} nodes, root included; "
        f"accepted per tree {per_tree:.3f}, per chain of {plan.shape.layers} {per_chain:.3f}; "
        f"{traces.novel.float().mean():.1%} of the states novel"
    )
    return 0


def collect_to(out: Path, directory: Path, plan: CollectPlan) -> Traces:
    """collect() into a trace file. What an interrupted run had finished is kept beside it and used again."""
    from c2t_plugin.lab.pairs import describe_pair
    from c2t_plugin.lab.unfinished import Unfinished
    from c2t_plugin.traces.file import save_traces

    own = Path(plan.prompts)
    settings = {
        "plan": asdict(plan),
        "pair": describe_pair(directory, plan.draft),
        "prompt file": zlib.crc32(own.read_bytes()) if own.suffix == PROMPT_FILE and own.is_file() else None,
    }
    unfinished = Unfinished.of(out, settings, plan.seed)
    traces = collect(directory, plan, unfinished)
    save_traces(traces, out)
    unfinished.finish()
    return traces


def collect(directory: Path, plan: CollectPlan, unfinished: Unfinished | None = None) -> Traces:
    """Trees and chains of one draft of a pair directory, with a progress bar."""
    import torch

    from c2t_plugin.lab.pairs import describe_pair, load_pair
    from c2t_plugin.provenance import RunRecord
    from c2t_plugin.traces.file import join_traces, load_traces, save_traces

    target, draft = load_pair(directory, plan.draft)
    pool = _pool(directory, plan)
    sources = {source: number for number, source in enumerate(dict.fromkeys(each.source for each in pool))}
    groups = torch.tensor([sources[each.source] for each in pool], dtype=torch.int32)
    header = {
        "pair": describe_pair(directory, plan.draft),
        "top_m": plan.shape.top_m,
        "prompts": Path(plan.prompts).name,
        "new_tokens": plan.new_tokens,
        "run": RunRecord.capture(seed=plan.seed).to_json() if unfinished is None else dict(unfinished.run),
    }
    parts: list[Traces] = []
    for prompts in _batches(target, pool, plan, parts):
        name = f"{len(parts):05}.traces"
        if unfinished is not None and unfinished.file(name).is_file():
            parts.append(load_traces(unfinished.file(name)))
            continue
        part = _record(target, draft, prompts, groups, plan, header)
        if unfinished is not None:
            unfinished.keep(name, partial(save_traces, part))
        parts.append(part)
    return join_traces(parts, header)


def _record(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Mapping[int, list[int]],
    groups: Tensor,
    plan: CollectPlan,
    header: Mapping[str, object],
) -> Traces:
    """What a draft proposes at all states of some prompts of one length. groups: (prompts of the pool,) int32."""
    import torch

    from c2t_plugin.lab.texts import end_of_text, greedy_text
    from c2t_plugin.traces.file import Traces

    texts = greedy_text(target, prompts, plan.new_tokens, plan.shape.layers)
    tree, chain = grow_both(draft, texts, plan.shape)
    states = len(texts.roots)
    prompt = texts.numbers.repeat_interleave(states)
    step = torch.arange(states).repeat(len(texts.numbers)).short()
    whole = Traces(tree, chain, prompt.int(), step, texts.novel(), header, groups[prompt])
    return whole[texts.running(end_of_text(target))]


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
    from c2t_plugin.lab.texts import end_of_text, greedy_text

    target, model = load_pair(directory, plan.draft)
    # one each, so that what one policy draws does not depend on the others
    generators = {name: torch.Generator().manual_seed(plan.seed) for name in policies}
    prompt: list[Tensor] = []
    found: dict[str, list[Outcomes]] = {name: [] for name in policies}
    for prompts in _batches(target, _pool(directory, plan), plan, prompt):
        texts = greedy_text(target, prompts, plan.new_tokens, plan.shape.layers)
        keep = texts.running(end_of_text(target))
        prompt.append(texts.numbers.repeat_interleave(len(texts.roots))[keep].int())
        with torch.inference_mode():
            batch, continuation = model.at(texts.token_ids, texts.roots), texts.continuation(plan.shape.layers)
            for name, policy in policies.items():
                grown = grow_live(batch.start(plan.shape.layers), policy, continuation, generators[name])
                found[name].append(grown.outcomes()[keep])
    return torch.cat(prompt), {name: concatenate(parts) for name, parts in found.items()}


def grow_both(model: DraftModel, texts: Texts, shape: TreeShape) -> tuple[Forest, Forest]:
    """Whole trees and greedy chains at all states of some texts."""
    import torch

    from c2t_plugin.lab.trees import grow

    chains = TreeShape(1, shape.layers, shape.top_m)
    with torch.inference_mode():
        batch, continuation = model.at(texts.token_ids, texts.roots), texts.continuation(shape.layers)
        tree, chain = (grow(batch.start(shape.layers), continuation, each) for each in (shape, chains))
    return tree, chain


def _pool(directory: Path, plan: CollectPlan) -> list[Prompt]:
    """The prompts that a plan may use; a prompt's number is its place."""
    from c2t_plugin.lab.corpora import SOURCES, file_prompts

    if plan.prompts in SOURCES:
        return SOURCES[plan.prompts](directory, -(-plan.trees // plan.new_tokens), plan.seed)
    return file_prompts(directory, Path(plan.prompts))


def _batches(
    target: PreTrainedModel, pool: Sequence[Prompt], plan: CollectPlan, done: Sequence[Sized]
) -> Iterator[dict[int, list[int]]]:
    """Prompts of one length, by number, until there are enough trees, with a progress bar.

    done: what the caller made of each batch so far, one entry per state. Where the target ends its text early a prompt
    gives fewer states; then further prompts follow.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from c2t_plugin.lab.texts import of_equal_length

    size = min(TEXTS_PER_BATCH, max(1, WORDS_PER_BATCH // target.config.vocab_size))
    used = 0
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        bar = progress.add_task(f"{plan.draft} trees", total=plan.trees)
        while (missing := plan.trees - sum(map(len, done))) > 0:
            if used == len(pool):
                raise C2TError(f"{used} prompts gave only {plan.trees - missing} of {plan.trees} trees; ask for fewer")
            chosen = range(used, min(len(pool), used + -(-missing // plan.new_tokens)))
            for numbers in of_equal_length({number: pool[number].token_ids for number in chosen}, size):
                yield {number: pool[number].token_ids for number in numbers}
                progress.update(bar, completed=sum(map(len, done)))
            used = chosen.stop
