"""Rules that no record can serve, drafted live at the states of texts that the target writes at some temperature.

A target that samples without looking at the draft (greedy and target-only verification) accepts what its own text goes
on with, so such rules need nothing but that text. Rejection sampling accepts by the probabilities of both models: here
the target reads the accepted path, node by node, and the reference verification decides among each node's children.
A rejection is drawn apart from the text that the states come from, so the next state that serving visits is of the
target's text, but not of the very text that was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab.drafts import DraftModel, ReadTexts
from c2t_plugin.lab.grow import Distributions, Drafter, Grown, TreePolicy, grow_tree
from c2t_plugin.lab.pairs import load_pair, stand_alone
from c2t_plugin.lab.replay import Outcomes, concatenate, grow_live
from c2t_plugin.lab.texts import Texts, end_of_text, held_out_prompts, of_equal_length
from c2t_plugin.lab.verify import (
    Chance,
    DraftTree,
    Sampler,
    Verification,
    Verified,
    compatible,
    probabilities,
    verify_chain,
    verify_multi_round,
    verify_without_replacement,
)
from c2t_plugin.trees.nodes import ROOT

Rejection = Callable[[DraftTree, Tensor, Tensor, Chance], Verified]
# SpecTr's verification follows equal siblings together, so one node at a time is not enough for it.
REJECTIONS: Mapping[Verification, Rejection] = MappingProxyType(
    {
        Verification.CHAIN: verify_chain,
        Verification.MULTI_ROUND: verify_multi_round,
        Verification.WITHOUT_REPLACEMENT: verify_without_replacement,
    }
)


@dataclass(frozen=True)
class Plan:
    """prompts: held-out ones, in the seed's order, the first `skip` left out. new: states of each, consecutive tokens
    of its text. layers: depth of the deepest nodes. temperature: of the target. together: texts that are drafted for at
    once."""

    prompts: int
    new: int
    layers: int
    temperature: float
    together: int = 4
    seed: int = 0
    skip: int = 0


@dataclass(frozen=True)
class Site:
    """Draft and target at all states of some texts; rows are text by text.

    prompt: (states,) int32 prompt numbers. running: (states,) bool, False past the end of a text.
    """

    texts: Texts
    target: PreTrainedModel
    model: DraftModel
    layers: int
    prompt: Tensor
    running: Tensor

    @cached_property
    def _draft(self) -> ReadTexts:
        return self.model.at(self.texts.token_ids, self.texts.roots)

    @cached_property
    def _target(self) -> ReadTexts:
        # drafts never read a text's first token, the target does: it becomes the second
        ids, roots = F.pad(self.texts.token_ids, (1, 0)), self.texts.roots
        return stand_alone(self.target).at(ids, range(roots.start + 1, roots.stop + 1))

    def drafter(self) -> Drafter:
        """The draft, at the start of new trees."""
        return self._draft.start(self.layers)

    def judge(self) -> Drafter:
        """The target, at the same states."""
        return self._target.start(self.layers)

    def by_text(self, policy: TreePolicy, generator: torch.Generator | None) -> Outcomes:
        """What the target accepts that samples, or chooses, without looking at the draft."""
        return grow_live(self.drafter(), policy, self.texts.continuation(self.layers), generator).outcomes()


def sites(pair: Path, draft: str, plan: Plan) -> Iterator[Site]:
    """The states of a plan, some texts at a time; C2TError if the pair has fewer prompts."""
    target, model = load_pair(pair, draft)
    last = plan.skip + plan.prompts
    pool = held_out_prompts(pair, last, plan.seed)
    prompts = {number: pool[number].token_ids for number in range(plan.skip, last)}
    end = end_of_text(target)
    for texts in written(target, prompts, plan):
        prompt = texts.numbers.repeat_interleave(len(texts.roots)).int()
        yield Site(texts, target, model, plan.layers, prompt, texts.running(end))


def written(target: PreTrainedModel, prompts: Mapping[int, list[int]], plan: Plan) -> Iterator[Texts]:
    """The target's texts after prompts, by number; as `lab.texts.greedy_text`, at the plan's temperature."""
    generator = torch.Generator().manual_seed(plan.seed)
    for chosen in of_equal_length(prompts, plan.together):
        rows = torch.tensor([prompts[number] for number in chosen])
        text = _continue(target, rows, plan.new + plan.layers, plan.temperature, generator)
        yield Texts(torch.tensor(chosen), text, range(rows.shape[1], rows.shape[1] + plan.new))


@torch.inference_mode()
def _continue(
    target: PreTrainedModel, rows: Tensor, new: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """(texts, length) int64 -> (texts, length + new), each token drawn from softmax(logits / temperature)."""
    cache = DynamicCache(config=target.config)
    step, pieces = rows, [rows]
    for _ in range(new):
        logits = target(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        step = torch.multinomial(probabilities(logits.float(), temperature), 1, generator=generator)
        pieces.append(step)
    return torch.cat(pieces, dim=1)


def by_text(
    pair: Path, draft: str, plan: Plan, policies: Mapping[str, TreePolicy]
) -> tuple[Tensor, dict[str, Outcomes]]:
    """All policies at the same states: (states,) int32 prompt numbers, as `replay.serve` takes them, and outcomes."""
    generators = {name: torch.Generator().manual_seed(plan.seed) for name in policies}
    prompt: list[Tensor] = []
    found: dict[str, list[Outcomes]] = {name: [] for name in policies}
    with torch.inference_mode():
        for site in sites(pair, draft, plan):
            prompt.append(site.prompt[site.running])
            for name, policy in policies.items():
                found[name].append(site.by_text(policy, generators[name])[site.running])
    return torch.cat(prompt), {name: concatenate(parts) for name, parts in found.items()}


def by_rejection(
    site: Site,
    policy: TreePolicy,
    verification: Verification,
    draft_temperature: float,
    target_temperature: float,
    generator: torch.Generator,
) -> Outcomes:
    """A sampled tree at every state of a site, verified by rejection. generator: of the draws and of the verdicts.

    ConfigError as of accept_lengths.
    """
    grown = grow_tree(site.drafter(), policy, generator)
    lengths = accept_lengths(
        grown, site.judge(), verification, draft_temperature, target_temperature, Sampler(generator)
    )
    nothing = torch.zeros_like(grown.passes)
    return Outcomes(grown.tree.sizes(), lengths, grown.passes, grown.wasted_passes(lengths), nothing)


def accept_lengths(
    grown: Grown,
    target: Drafter,
    verification: Verification,
    draft_temperature: float,
    target_temperature: float,
    chance: Chance,
) -> Tensor:
    """Accepted draft tokens of each tree, bonus excluded: (states,) int64.

    The target reads one node per state and call. A node's children, alone, are a tree that the verification judges as
    it judges them in the whole one, because it walks from node to node. ConfigError if the verification is not exact
    for these trees.
    """
    tree, verify = grown.tree, _rejection(grown, verification)
    lengths = torch.zeros(tree.batch, dtype=torch.int64)
    nodes = torch.full((tree.batch,), ROOT)
    going = torch.ones(tree.batch, dtype=torch.bool)
    distributions: Distributions = target.root()
    for call in range(tree.nodes + 1):
        probs = probabilities(distributions.logits()[:, 0].double(), target_temperature)
        for row in going.nonzero().flatten().tolist():
            nodes[row] = _next(grown, row, int(nodes[row]), probs[row], verify, draft_temperature, chance)
        going = going & (nodes != ROOT)
        if not going.any():
            return lengths
        lengths += going
        # padded: token 0 below the root. The node before was number call - 1 in every state that goes on.
        token = tree.token_ids.gather(1, nodes.clamp_min(0)[:, None]).masked_fill(~going[:, None], 0)
        above = torch.full_like(token, call - 1).masked_fill(~going[:, None], ROOT)
        distributions = target.extend(token, above)
    raise C2TError("a path is longer than its tree has nodes; its parents are no tree")


def accepted_children(
    grown: Grown,
    after: Distributions,
    verification: Verification,
    draft_temperature: float,
    target_temperature: float,
    chance: Chance,
) -> Tensor:
    """Rank of the root's child that is accepted in each tree, -1 for none: (states,) int64.

    after: the target's distributions after the roots. ConfigError as of accept_lengths.
    """
    verify = _rejection(grown, verification)
    probs = probabilities(after.logits()[:, 0].double(), target_temperature)
    found = torch.full((grown.tree.batch,), ROOT)
    for row in range(grown.tree.batch):
        node = _next(grown, row, ROOT, probs[row], verify, draft_temperature, chance)
        found[row] = ROOT if node == ROOT else grown.tree.rank[row, node]
    return found


def _rejection(grown: Grown, verification: Verification) -> Rejection:
    compatible(grown.drafting, verification)
    if verification not in REJECTIONS:
        known = ", ".join(each.value for each in REJECTIONS)
        raise ConfigError(f"{verification.value} cannot judge a tree node by node; use {known}")
    return REJECTIONS[verification]


def _next(
    grown: Grown,
    row: int,
    node: int,
    target_probs: Tensor,
    verify: Rejection,
    draft_temperature: float,
    chance: Chance,
) -> int:
    """The child of a node that is accepted, -1 if none is."""
    tree = grown.tree
    children = (tree.alive[row] & (tree.parent_ids[row] == node)).nonzero().flatten()
    if not len(children):
        return ROOT
    star = DraftTree(tree.token_ids[row, children], torch.full_like(children, ROOT))
    draft_probs = probabilities(grown.logits_after(row, node).double(), draft_temperature)
    # rows of the children: what follows them is not looked at
    wide = (len(children) + 1, -1)
    verified = verify(star, draft_probs.expand(wide), target_probs.expand(wide), chance)
    return int(children[verified.nodes[0]]) if verified.nodes else ROOT
