"""Cost curves from data sheets: what a pass must cost at least on a GPU that is not at hand.

A pass takes as long as the slower of reading the weights once and multiplying. What no data sheet says (how much of the
peak a kernel reaches, what the host costs) stands in `Assumptions`. Curves made here are good for comparing arms, and
predict no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import CostCurve

BYTES = 2  # of a weight, an activation and a cached value in bfloat16
# Tokens of a pass at which curves have points: all where a GPU turns from reading to multiplying.
COUNTS = (*range(1, 512), *range(512, 4097, 64))


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. bandwidth: bytes/s. flops: dense bfloat16 FLOP/s. link: bytes/s to the others, one direction."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    source: str


GPUS = {
    "H200": Gpu("H200", 141e9, 4.8e12, 989.5e12, 450e9, "NVIDIA H200 data sheet, SXM (halved where it says sparse)"),
    "A100": Gpu("A100", 80e9, 2.039e12, 312e12, 300e9, "NVIDIA A100 data sheet, 80 GB SXM"),
    "L40": Gpu("L40", 48e9, 0.864e12, 181.05e12, 32e9, "NVIDIA L40 data sheet; its link is PCIe 4.0 x16"),
}


@dataclass(frozen=True)
class Model:
    """A dense Llama by the numbers of its published config.json, or an EAGLE head of its shape.

    inputs: residual streams beside each other that q, k and v read. projection: weights outside of the layers that
    every pass reads. features: those that a pass over the target's features reads besides.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    inputs: int = 1
    projection: int = 0
    features: int = 0

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        read = self.inputs * (self.heads + 2 * self.kv_heads)
        return self.hidden * self.head_dim * (read + self.heads) + 3 * self.hidden * self.inner

    @property
    def body(self) -> int:
        """Weights that every token of a pass is multiplied with."""
        return self.layers * self.layer_weights + self.projection

    @property
    def weights(self) -> int:
        """Weights that a pass reads: all but the embedding, of which it reads single rows."""
        return self.body + self.hidden * self.vocab

    @property
    def of_features(self) -> Model:
        """The same where it reads the target's features, as in a prompt and after a verification."""
        return replace(self, projection=self.projection + self.features, features=0)

    @property
    def cache_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


MODELS = {
    "llama-3.1-8b": Model("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128_256),
    "llama-3-70b": Model("llama-3-70b", 80, 8192, 28672, 64, 8, 128_256),
    "llama-3.2-1b": Model("llama-3.2-1b", 16, 2048, 8192, 32, 8, 128_256, head_dim=64),
}


def eagle1_head(target: Model) -> Model:
    """One layer of the target's shape with its vocabulary, behind a projection of token and state."""
    return replace(target, name=f"eagle-{target.name}", layers=1, projection=2 * target.hidden**2)


def eagle3_head(target: Model, vocab: int) -> Model:
    """One layer that reads token and state beside each other; three of the target's states become one in the first pass
    of a step only."""
    return replace(target, name=f"eagle3-{target.name}", layers=1, vocab=vocab, inputs=2, features=3 * target.hidden**2)


def draft_of(kind: str, target: Model) -> Model:
    """The draft that a kind of the pair's drafts stands for: EAGLE-1 has all tokens, EAGLE-3 32,000 of them."""
    drafts = {
        "eagle1": eagle1_head(target),
        "eagle3": eagle3_head(target, 32_000),
        "draft": MODELS["llama-3.2-1b"],
    }
    if kind not in drafts:
        raise ConfigError(f"draft must be one of {', '.join(drafts)}, got {kind!r}")
    return drafts[kind]


@dataclass(frozen=True)
class Assumptions:
    """What data sheets do not say; none of it is measured.

    bandwidth_share, flops_share: of the peaks that a pass reaches. host: seconds of a step on the host. all_reduce:
    seconds of one all-reduce, or gathering, of few bytes. launch: seconds of a draft pass besides its arithmetic.
    score: seconds of C2T's statistics and classifier of a pass besides reading the logits. context: cached tokens of a
    request.
    """

    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    host: float = 1e-3
    all_reduce: float = 10e-6
    launch: float = 50e-6
    score: float = 20e-6
    context: int = 512

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "flops_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if min(self.host, self.all_reduce, self.launch, self.score, self.context) < 0:
            raise ConfigError(f"assumed times and the context must be 0 or more, got {self}")


@dataclass(frozen=True)
class Machine:
    """tp GPUs that share every matrix (tensor parallelism)."""

    gpu: Gpu
    tp: int = 1
    assumed: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tensor parallelism needs at least 1 GPU, got {self.tp}")

    def pass_s(self, model: Model, tokens: int, predicted: int | None = None) -> float:
        """Seconds of a pass over so many tokens, keys and values aside. predicted: those with logits, None for all."""
        predicted = tokens if predicted is None else predicted
        reading = model.weights * BYTES / (self.gpu.bandwidth * self.assumed.bandwidth_share)
        products = model.body * tokens + model.hidden * model.vocab * predicted
        multiplying = 2 * products / (self.gpu.flops * self.assumed.flops_share)
        shared = self._all_reduce_s(model, tokens) + self._gather_s(model, predicted)
        return max(reading, multiplying) / self.tp + shared

    def _all_reduce_s(self, model: Model, tokens: int) -> float:
        """Two all-reduces a layer; each byte crosses the link 2 (tp - 1) / tp times."""
        if self.tp == 1:
            return 0.0
        sent = tokens * model.hidden * BYTES * 2 * (self.tp - 1) / self.tp
        return 2 * model.layers * (self.assumed.all_reduce + sent / self.gpu.link)

    def _gather_s(self, model: Model, predicted: int) -> float:
        """Each GPU has the logits of its part of the vocabulary and fetches the others'."""
        if self.tp == 1:
            return 0.0
        fetched = predicted * model.vocab * BYTES * (self.tp - 1) / self.tp
        return self.assumed.all_reduce + fetched / self.gpu.link

    def cache_s(self, model: Model, requests: float) -> float:
        """Seconds of reading the keys and values of so many requests."""
        bandwidth = self.gpu.bandwidth * self.assumed.bandwidth_share * self.tp
        return requests * self.assumed.context * model.cache_per_token / bandwidth

    def fits(self, models: tuple[Model, ...], requests: int) -> bool:
        """Whether weights, embeddings and caches of so many requests have place."""
        weights = sum(model.of_features.weights + model.hidden * model.vocab for model in models) * BYTES
        cache = sum(model.cache_per_token for model in models) * requests * self.assumed.context
        return weights + cache <= self.gpu.memory * self.tp

    def beyond(self, tokens: int, drafting: int) -> str:
        """Nothing is: a longer pass multiplies in proportion."""
        return ""

    def curve(
        self, target: Model, draft: Model | None, requests: int, scored: bool = False, width: int = 1
    ) -> CostCurve:
        """The cost curve of steps of about `requests` requests.

        draft: None for a server without speculation. scored: C2T's statistics of every draft pass are in its cost.
        width: tokens of a request that a draft pass reads: 1 for chains, K for trees.

        `draft_extend` is the pass with which the draft reads what was accepted. It gives the first draft token too, so
        d of them take d passes in all, and none take one.
        """
        verify = tuple((count, self.pass_s(target, count)) for count in COUNTS)
        fixed = self.assumed.host + self.cache_s(target, requests)
        if draft is None:
            return CostCurve(verify, draft=((1, 1e-9), (2, 1e-9)), fixed=fixed)
        steps = tuple((count, self._draft_s(draft, count, scored, width, width)) for count in COUNTS)
        several = 3  # tokens of a request that it reads then, about
        return CostCurve(
            verify, steps, fixed, draft_extend=self._draft_s(draft.of_features, requests, scored, several, 1)
        )

    def _draft_s(self, draft: Model, requests: int, scored: bool, read: int, predicted: int) -> float:
        """read, predicted: tokens of each request."""
        seconds = self.pass_s(draft, requests * read, requests * predicted)
        seconds += self.cache_s(draft, requests) + self.assumed.launch
        if scored:
            logits = requests * predicted * draft.vocab * BYTES / (self.gpu.bandwidth * self.assumed.bandwidth_share)
            seconds += self.assumed.score + logits
        return seconds


@dataclass(frozen=True)
class Measured:
    """A cost curve that a server measured, in the place of a data sheet: of its models, its GPUs, what it had cached.

    Caches are in its passes. The host's time is not, unless the file says otherwise: servers measure no `fixed`. What
    C2T's statistics and classifier cost is in every draft pass, of arms that draft without them too.
    """

    measured: CostCurve

    def cache_s(self, model: Model, requests: float) -> float:
        """Nothing: it is in the curve."""
        return 0.0

    def fits(self, models: tuple[Model, ...], requests: int) -> bool:
        """It was measured, so it fitted; how far it was measured is what `beyond` is about."""
        return True

    def beyond(self, tokens: int, drafting: int) -> str:
        """Why a step cannot be priced that verifies so many tokens and drafts for so many; empty if it can."""
        for what, points, count in (("verify", self.measured.verify, tokens), ("draft", self.measured.draft, drafting)):
            last = _last_measured(points)
            if count > last:
                return f"the curve's {what} passes were measured up to {last}, this would take {count}"
        return ""

    def curve(
        self, target: Model, draft: Model | None, requests: int, scored: bool = False, width: int = 1
    ) -> CostCurve:
        """See Machine.curve. Plain decoding has no draft to keep up with; models and `scored` change nothing here."""
        if draft is None:
            return replace(self.measured, draft_extend=0.0)
        if width == 1:
            return self.measured
        steps = tuple((count, self.measured.draft_s(count * width)) for count in COUNTS)
        return replace(self.measured, draft=steps)


def _last_measured(points: Sequence[tuple[int, float]]) -> int:
    """The largest count that was measured: a server that saw one size only writes it twice, the count doubled."""
    (before, cheaper), (last, seconds) = points[-2:]
    return before if len(points) == 2 and (last, seconds) == (2 * before, cheaper) else last
