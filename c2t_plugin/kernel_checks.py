"""Each kernel against its float32 reference on the machine at hand: `c2t doctor --gpu`, and a server's self-check."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_kernels import ChainState, DraftStats, ScoringNetwork

# float32 sums of up to a vocabulary's terms, and of a hidden layer's, in another order
STATS_ALLOWED, SCORE_ALLOWED = 2e-4, 1e-4
# an output near 1 in so many bits, whose reference rounds once
ATTENTION_ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@dataclass(frozen=True)
class Shapes:
    """Of one server, or what is usual. width: places of a request's window, at least 3. network: its classifier. topk:
    children of a node, and nodes of a layer, of a tree that is grown; of chains 1."""

    device: torch.device
    network: ScoringNetwork
    vocabulary: int = 32_000
    requests: int = 64
    width: int = 7
    dtype: torch.dtype = torch.bfloat16
    top_m: int = 1000
    topk: int = 4
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    prefix: int = 300

    def random(self, generator: torch.Generator, *shape: int) -> Tensor:
        """float32, from 0 to 1."""
        return torch.rand(*shape, generator=generator, device=self.device)


class Checked(NamedTuple):
    """One kernel. error: largest absolute difference from its reference; infinite where integers or signs differ.
    microseconds: of one launch with what the host does for it. failure: why it did not run."""

    name: str
    error: float
    allowed: float
    microseconds: float
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Whether it may be used."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        if self.failure:
            return f"did not run ({self.failure})"
        return f"off by {self.error:.2g}, allowed {self.allowed:.2g}, {self.microseconds:.0f} us"


# Called with which side it is to run; all that is written to is made anew by each call.
_Run = Callable[[Callable[[str, str], Any]], Sequence[Tensor]]
# An operation's name, what its error may be, and the run.
Check = tuple[str, float, _Run]


def check(shapes: Shapes, *, trees: bool = True, also: Sequence[Check] = ()) -> Iterator[Checked]:
    """One after another, so that who asks may stop. trees: also those that trees alone need. also: further ones."""
    checks: list[Check] = [
        ("draft_stats", STATS_ALLOWED, _stats(shapes)),
        ("score_chain", SCORE_ALLOWED, _score(shapes)),
        ("early_stop", 0.0, _stop(shapes)),
        ("pack_ragged", 0.0, _pack(shapes)),
    ]
    if trees:
        checks += [
            ("grow_layer", SCORE_ALLOWED, _grow(shapes)),
            ("fill_spare_rows", 0.0, _fill(shapes)),
            ("clip_trees", 0.0, _clip(shapes)),
            ("build_tree", 0.0, _build(shapes)),
            ("full_mask", 0.0, _mask(shapes)),
            ("tree_attention", ATTENTION_ALLOWED[shapes.dtype], _attention(shapes)),
        ]
    for name, allowed, run in (*checks, *also):
        yield _checked(name, allowed, run, shapes.device)


def _checked(name: str, allowed: float, run: _Run, device: torch.device) -> Checked:
    try:
        found, expected = run(_kernels(device)), run(_references)
        error = max(_far(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        return Checked(name, error, allowed, _timed(lambda: run(_kernels(device)), device))
    except Exception as failure:  # whatever a compiler or a driver raises
        return Checked(name, math.inf, allowed, 0.0, f"{type(failure).__name__}: {failure}")


def _references(package: str, name: str) -> Any:
    return getattr(import_module(f"c2t_kernels.{package}.reference"), name)


def _kernels(device: torch.device) -> Callable[[str, str], Any]:
    """Where there are none, in their place what runs there."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return _references
    return lambda package, name: getattr(import_module(f"c2t_kernels.{package}.kernel"), name)


def _far(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found.to(expected.dtype), expected) else math.inf
    mine, theirs = found.double(), expected.double()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    return float((mine - theirs).masked_fill(same, 0.0).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize
    wait()
    begun = time.perf_counter()
    call()
    wait()
    return 1e6 * (time.perf_counter() - begun)


def _generator(shapes: Shapes) -> torch.Generator:
    return torch.Generator(shapes.device).manual_seed(0)


def _stats(shapes: Shapes) -> _Run:
    drawn = torch.empty(shapes.requests, shapes.vocabulary, device=shapes.device)
    logits = drawn.normal_(0, 3, generator=_generator(shapes)).to(shapes.dtype)
    k = min(shapes.topk, shapes.vocabulary)
    at = 2 * torch.arange(shapes.requests, device=shapes.device).flip(0)

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        found = side("stats", "draft_stats")(logits, shapes.top_m, k)
        # and as the seeds of a next draft are kept: each in its request's slot
        buffers = ((2 * len(at), *each.shape[1:]) for each in found)
        seeds = DraftStats(*(each.new_zeros(size) for each, size in zip(found, buffers, strict=True)))
        side("stats", "draft_stats")(logits, shapes.top_m, k, out=seeds, at=at)
        # of equal logits either may come first
        return logits.gather(1, found.token_ids), *found[1:], *seeds[1:]

    return run


def _score(shapes: Shapes) -> _Run:
    depths = min(2, shapes.width - 1)
    drawn = drawn_stats(shapes, depths)

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        state = ChainState.create(shapes.requests, shapes.width - 1, shapes.device)
        for depth, stats in enumerate(drawn, start=1):
            side("score", "score_chain")(state, shapes.network, *stats, depth)
        return state.confidence[:, :depths], state.joint_log_prob

    return run


def drawn_stats(shapes: Shapes, depths: int) -> Tensor:
    """(depths, 3, requests): log probabilities, entropies and margins of so many draft steps."""
    highest = torch.tensor([[-4.0], [8.0], [2.0]], device=shapes.device)
    return shapes.random(_generator(shapes), depths, 3, shapes.requests) * highest


def _stop(shapes: Shapes) -> _Run:
    generator, drafted = _generator(shapes), shapes.width - 1
    confidence = shapes.random(generator, shapes.requests, drafted)
    confidence[0, 0] = torch.nan
    beta = shapes.random(generator, shapes.requests)
    longest = torch.full((shapes.requests,), drafted, dtype=torch.int32, device=shapes.device)
    budget = shapes.requests * drafted // 2

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        # as a step that waits for nothing has it
        told = {"unclipped": torch.empty_like(longest), "unknown": longest.new_zeros(1, dtype=torch.int64)}
        told["links"] = torch.arange(1, shapes.width + 1, device=shapes.device).repeat(shapes.requests, 1)
        stop = side("stop", "early_stop")
        # and as one that waits for its own confidences
        whole = stop(confidence, beta, longest)
        return whole, stop(confidence, beta, longest, budget=budget, **told), *told.values()

    return run


def _pack(shapes: Shapes) -> _Run:
    generator, width, requests = _generator(shapes), shapes.width, shapes.requests
    kept = (shapes.random(generator, requests) * width).int()
    words = torch.arange(requests * width, device=shapes.device).view(requests, width)
    wide = shapes.random(generator, (requests + 1) * width, 64)
    # as few as hold all, and with room for everybody's window and a slot of nobody
    capacities = (int(kept.sum()) + requests, None), ((requests + 1) * width, requests + 1)

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for capacity, slots in capacities:
            values, starts, lengths = side("pack", "pack_ragged")(
                kept, [words, words + 1, words + 2], capacity=capacity, pads=(0, 0, 0), slots=slots
            )
            back = side("pack", "scatter_ragged")(wide[:capacity], starts[: requests + 1], width, fill=0)
            found += [*values, starts, lengths, back]
        return found

    return run


def _grow(shapes: Shapes) -> _Run:
    generator, k, rows = _generator(shapes), shapes.topk, shapes.requests * shapes.topk
    log_probs = (-4 * shapes.random(generator, rows, k)).sort(dim=1, descending=True).values
    ids = torch.arange(k, device=shapes.device).repeat(rows, 1)
    stats = DraftStats(ids, log_probs, 8 * shapes.random(generator, rows), shapes.random(generator, rows))
    joint, path = -shapes.random(generator, shapes.requests, k), shapes.random(generator, shapes.requests, k)
    alive = shapes.random(generator, shapes.requests, k) < 0.9
    beta = torch.full((1,), 0.4, device=shapes.device)
    return lambda side: tuple(side("growth", "grow_layer")(shapes.network, joint, path, alive, stats, beta, 2, width=k))


def _fill(shapes: Shapes) -> _Run:
    generator, most = _generator(shapes), shapes.width - 1
    key = shapes.random(generator, shapes.requests, 2 * most)
    # a kernel that fills these too differs whatever is drawn
    own = torch.arange(shapes.requests, device=shapes.device) % 3 == 0
    keep = (key > 0.8) & ~own[:, None]
    sizes = torch.tensor([shapes.requests * shapes.width], device=shapes.device)

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        fill = side("spare", "fill_spare_rows")
        return fill(keep, key, most, sizes), fill(keep, key, most, sizes, own)

    return run


def _clip(shapes: Shapes) -> _Run:
    generator, most = _generator(shapes), shapes.width - 1
    key = shapes.random(generator, shapes.requests, 2 * most)
    # of about as many nodes as trees have at most, half
    return lambda side: tuple(side("clip", "clip_trees")(key > 0.5, key, most, shapes.requests * most // 2))


def _tree(shapes: Shapes) -> tuple[Tensor, ...]:
    """parent_ids, keep, token_ids, root_tokens, prefix_lens of random trees."""
    generator, nodes = _generator(shapes), shapes.width - 1
    drawn = shapes.random(generator, shapes.requests, nodes)
    parents = (drawn * torch.arange(nodes, device=shapes.device)).long() - 1
    tokens = torch.arange(nodes, device=shapes.device).repeat(shapes.requests, 1)
    roots = torch.zeros(shapes.requests, dtype=torch.int64, device=shapes.device)
    return parents, torch.ones_like(parents, dtype=torch.bool), tokens, roots, roots + shapes.prefix


def _build(shapes: Shapes) -> _Run:
    tree = _tree(shapes)
    return lambda side: tuple(side("tree_layout", "build_tree")(*tree, bucket=shapes.width))


def _mask(shapes: Shapes) -> _Run:
    generator, width, requests = _generator(shapes), shapes.width, min(shapes.requests, 8)
    trees = shapes.random(generator, requests, width, width) < 0.5
    prefixes = torch.arange(requests, device=shapes.device) + shapes.prefix
    counts = (torch.arange(requests, device=shapes.device) % width + 1).int()
    capacity = int((counts * (prefixes + counts)).sum())
    return lambda side: tuple(side("masks", "full_mask")(trees, prefixes, capacity=capacity, counts=counts))


def _attention(shapes: Shapes) -> _Run:
    generator, device = _generator(shapes), shapes.device
    (heads, kv_heads), dim, requests = shapes.heads, shapes.head_dim, min(shapes.requests, 8)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(shapes.dtype)

    sizes = torch.arange(requests, device=device) % shapes.width + 1
    starts, rows = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), int(sizes.sum())
    slots = requests * shapes.prefix
    new = random(rows, heads, dim), random(rows, kv_heads, dim), random(rows, kv_heads, dim)
    pools = random(slots, kv_heads, dim), random(slots, kv_heads, dim)
    pages = torch.randperm(slots, generator=generator, device=device)
    bounds = torch.arange(requests + 1, device=device) * shapes.prefix
    squares = torch.nn.functional.pad(sizes.square().cumsum(0), (1, 0))
    mask = shapes.random(generator, int(squares[-1])) < 0.5

    def run(side: Callable[[str, str], Any]) -> Sequence[Tensor]:
        attention = side("attention", "tree_attention")
        chains = attention(*new, *pools, starts, bounds, pages)
        return chains, attention(*new, *pools, starts, bounds, pages, mask, squares)

    return run
