"""What traces of served requests give away: sampled answers, recovered from statistics by who has models and prompt.

    python -m benchmarks.simulation.recovery
    python -m benchmarks.simulation.recovery --draft smollm2/eagle3
    python -m benchmarks.simulation.recovery --draft smollm2/eagle3 --secret

Answers are drawn at temperature 1, since greedy ones follow from the prompt without any trace. A draft of the toy pair,
or the real pair's head, drafts as a server does, and the recorder that servers use writes a file, once for each
precision. The attacker has that file, both models and the prompts, no answer and no seed. Each recorded state says how
many draft tokens the answer went on with; the token after those is unknown, and is looked for in the vocabulary: as the
target's, and by what the draft would then have said, against what the next state has recorded.

With --secret each answer is one known sentence with a number of four digits, which is drawn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.command import run
from benchmarks.pairs.smollm2.commands import encode, write_pair
from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.serving.real_pair import BASE, WORK, chat_prompts
from benchmarks.simulation.reading import D_MAX, TOP_M, Guesses, next_token
from benchmarks.simulation.secret import ASKED, DIGITS, sentence
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.drafts import TreeDraft
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces import coarse
from c2t_plugin.traces.file import SUFFIX, Traces, load_traces
from c2t_plugin.traces.recorder import TraceRecorder

SCENARIO = "traces-recovery"
REAL = f"smollm2/{BASE}"
DRAFTS = ("draft", "eagle3", "eagle1", "mtp", REAL)
PRECISIONS = ("exact", "coarse")
LABELS = "labels alone"
# Texts that are followed at a time, if none is so much likelier, in nats.
BEAM, BEHIND = 8, 30.0
# Tokens that are tried: so many of the target's likeliest and, if none of them fits so well, in tolerances, MOST. The
# whole chain is looked at of those that fit best.
LIKELIEST, FITS, LOOKED_AT, MOST = 256, 8.0, 32, 8192
# A difference that floats may have between two machines, in nats, and one step of a coarse code.
TOLERANCE = {"exact": 1e-3, "coarse": 0.5}
# Of the real pair, tokens: a text is read anew for every guess.
LONGEST_PROMPT = 96
# Beyond so many tolerances a difference is as good as any.
LARGEST = 20.0
LIMIT_MB = 1000.0


@dataclass(frozen=True)
class Plan:
    """prompts: of the held-out ones. new: tokens of each answer. draft: one of DRAFTS. secret: whether the answers
    are a known sentence but for a number."""

    prompts: int
    new: int
    seed: int = 0
    draft: str = DRAFTS[0]
    secret: bool = False


class Setting(NamedTuple):
    """What the attacker has beside a trace. prompts: token ids. known: what each token of an answer may be, None:
    anything."""

    target: Any
    draft: TreeDraft
    prompts: Sequence[list[int]]
    known: Sequence[Sequence[int]] | None = None


def draw(target: Any, prompt: Sequence[int], new: int, chance: torch.Generator) -> list[int]:
    """An answer of the target alone at temperature 1."""
    answer: list[int] = []
    while len(answer) < new:
        likely = next_token(target, [*prompt, *answer]).exp()
        answer.append(int(torch.multinomial(likely, 1, generator=chance)))
    return answer


def record(recorder: TraceRecorder, draft: TreeDraft, prompt: list[int], answer: list[int]) -> None:
    """Draft along an answer as a server does, one step after the other."""
    number, step = recorder.admit(str(prompt)), 0
    while step < len(answer):
        chain = Guesses(draft, [*prompt, *answer[:step]]).chains(torch.tensor(answer[step : step + 1]))
        drafted = chain.tokens[0].tolist()
        recorder.add(number, step, chain.stats[0], drafted)
        following = answer[step + 1 : step + 1 + D_MAX]
        agree = [mine == its for mine, its in zip(drafted, following, strict=False)]
        step += 1 + (agree.index(False) if False in agree else len(agree))
    recorder.finish(number, prompt, answer)


class Text(NamedTuple):
    """What an answer may be, and how unlikely that is, in nats."""

    answer: list[int]
    cost: float


class Attack:
    """Reads one request's states, in their order, and says what its answer was."""

    def __init__(
        self, target: Any, draft: TreeDraft, precision: str | None, known: Sequence[Sequence[int]] | None = None
    ) -> None:
        """precision: of the recorded statistics; None does without them. known: see Setting."""
        self._target, self._draft, self._precision, self._known = target, draft, precision, known

    def answer(self, prompt: Sequence[int], states: Traces, new: int) -> list[int]:
        """(new,) tokens, -1 behind the last recorded state."""
        texts = [Text([], 0.0)]
        for row in range(len(states)):
            assert int(states.step[row]) == len(texts[0].answer), "a state is missing"
            texts = [found for text in texts for found in self._go_on(prompt, text, states[torch.tensor([row])])]
            texts = sorted(texts, key=lambda text: text.cost)[:BEAM]
            texts = [text for text in texts if text.cost < texts[0].cost + BEHIND]
        return [*texts[0].answer, *[-1] * new][:new]

    def _go_on(self, prompt: Sequence[int], text: Text, state: Traces) -> Iterator[Text]:
        """The text with a root of the state, and with what was accepted of its draft."""
        known = [*prompt, *text.answer]
        unlikely, tokens = (-next_token(self._target, known)).sort()
        if self._known is not None:
            # whatever the target thinks of a number, it was drawn
            tokens = torch.tensor(self._known[len(text.answer)])
            unlikely = torch.zeros(len(tokens))
        guesses = Guesses(self._draft, known)
        tries = (1,) if self._precision is None else (LIKELIEST, MOST)
        for tried in tries:
            some, costs = tokens[:tried], unlikely[:tried]
            if len(some) > LOOKED_AT:
                costs = costs + self._difference(guesses.tops(some), state, ("log_prob", "margin"))
                first = costs.topk(LOOKED_AT, largest=False).indices
                some, costs = some[first], unlikely[first]
            chains = guesses.chains(some)
            difference = self._difference(chains.stats, state)
            if difference.min() <= FITS:
                break
        hits, costs = int(state.chain.accepted[0].sum()), text.cost + costs + difference
        for token, cost, drafted in zip(some.tolist(), costs.tolist(), chains.tokens.tolist(), strict=True):
            yield Text([*text.answer, token, *drafted[:hits]], cost)

    def _difference(self, stats: Tensor, state: Traces, names: Sequence[str] = tuple(coarse.TOP)) -> Tensor:
        """(texts,) in tolerances, between these of what the draft says and what was recorded, as deep as the former
        goes. stats: (texts, length, 4)."""
        if self._precision is None:
            return torch.zeros(len(stats))
        own = self._numbers(_tables(stats), names)
        recorded = {name: getattr(state.chain, name)[:, : own.shape[1]] for name in coarse.TOP}
        difference = (own - self._numbers(recorded, names)).abs() / TOLERANCE[str(self._precision)]
        return difference.clamp(max=LARGEST).sum((1, 2))

    def _numbers(self, tables: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """(texts, length, names) as they are compared: values, or codes."""
        found = tables if self._precision == "exact" else coarse.packed(tables)
        return torch.stack([found[name].float() for name in names], dim=-1)


def _tables(stats: Tensor) -> dict[str, Tensor]:
    return {"log_prob": stats[..., 1], "entropy": stats[..., 2], "margin": stats[..., 3]}


def setting_of(plan: Plan, work: Path = WORK) -> Setting:
    """Models and prompts. work: where the real pair is, or is written."""
    if plan.draft == REAL:
        pair, kind = write_pair(work), BASE
        asked = chat_prompts(pair / "target", "development", plan.seed)
        prompts = [list(ids) for ids in asked.ids if len(ids) <= LONGEST_PROMPT][: plan.prompts]
    else:
        pair, kind, prompts = pair_dir(), plan.draft, held_out_prompts(plan.prompts, seed=plan.seed)
    target, draft = load_pair(pair, kind)
    known = None
    if plan.secret:
        (asked_for,), known = (
            encode(pair / "target", [{"messages": [{"role": "user", "content": ASKED}]}]),
            sentence(pair),
        )
        prompts = [list(asked_for)] * plan.prompts
    return Setting(target, draft, prompts, known)  # type: ignore[arg-type]


def _answers(plan: Plan, setting: Setting) -> list[list[int]]:
    chance = torch.Generator().manual_seed(plan.seed)
    if setting.known is None:
        return [draw(setting.target, prompt, plan.new, chance) for prompt in setting.prompts]
    places = [torch.randint(len(each), (len(setting.prompts),), generator=chance).tolist() for each in setting.known]
    return [[each[place] for each, place in zip(setting.known, row, strict=True)] for row in zip(*places, strict=True)]


def recover(plan: Plan, setting: Setting, folder: Path) -> dict[str, dict[str, float | None]]:
    """Metrics by arm. folder: for the traces."""
    target, draft, prompts, known = setting
    answers = _answers(plan, setting)
    new = len(answers[0])
    found: dict[str, dict[str, float | None]] = {}
    for precision in PRECISIONS:
        header = {"pair": {"kind": plan.draft}, "top_m": TOP_M, "prompts": "served", "new_tokens": None}
        here = folder / precision
        recorder = TraceRecorder(here, 1.0, D_MAX, header, LIMIT_MB, exact=precision == "exact")
        for prompt, answer in zip(prompts, answers, strict=True):
            record(recorder, draft, prompt, answer)
        recorder.close()
        size = sum(path.stat().st_size for path in here.glob(f"*{SUFFIX}"))
        traces = load_traces(here)
        requests = [traces[traces.prompt == number] for number in range(len(prompts))]
        ends = [int(each.step[-1]) + 1 + int(each.chain.accepted[-1].sum()) for each in requests]
        arms = {precision: precision} | ({LABELS: None} if precision == PRECISIONS[-1] else {})
        for arm, used in arms.items():
            attack = Attack(target, draft, used, known)
            guesses = [attack.answer(prompt, states, new) for prompt, states in zip(prompts, requests, strict=True)]
            found[arm] = {**_counts(answers, guesses, ends, known), "states": len(traces), "bytes": size}
    return found


def _counts(
    answers: Sequence[list[int]],
    guesses: Sequence[list[int]],
    covered: Sequence[int],
    known: Sequence[Sequence[int]] | None,
) -> dict[str, float | None]:
    """covered: tokens of each answer up to the end of its last recorded state. known: see Setting; what is known is not
    counted."""
    unknown = [True] * len(answers[0]) if known is None else [len(each) > 1 for each in known]
    pairs = [
        list(itertools.compress(zip(mine, its, strict=True), unknown[:end]))
        for mine, its, end in zip(answers, guesses, covered, strict=True)
    ]
    right = [[mine == its for mine, its in each] for each in pairs]
    return {
        "answers": len(answers),
        "whole_answers": sum(map(all, right)),
        "recorded_tokens": sum(map(len, right)),
        "recovered_tokens": sum(map(sum, right)),
    }


def main(argv: list[str]) -> int:
    """Record, attack, print, append rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.recovery",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--draft", choices=DRAFTS, default=DRAFTS[0], help=f"(default: {DRAFTS[0]}, stand-alone)")
    parser.add_argument("--work", type=Path, default=WORK, help=f"directory of the real pair (default: {WORK})")
    parser.add_argument("--prompts", type=int, default=4, help="answers to recover (default: 4)")
    parser.add_argument("--new", type=int, default=24, help="tokens of each (default: 24)")
    parser.add_argument(
        "--secret", action="store_true", help="answers are known but for a number (the real pair alone)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/recovery/rows.jsonl"), help="rows are appended here")
    options = parser.parse_args(argv)
    plan = Plan(options.prompts, options.new, options.seed, options.draft, options.secret)
    if plan.secret and plan.draft != REAL:
        raise C2TError(f"--secret is for --draft {REAL}; got {plan.draft}")
    record_of_run = RunRecord.capture(seed=plan.seed).to_json()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        found = recover(plan, setting_of(plan, options.work), Path(folder))
    setting: dict[str, Any] = {
        **({"answers": f"known but for {DIGITS} digits"} if plan.secret else {}),
        "draft": plan.draft,
        "d_max": D_MAX,
        "requests": plan.prompts,
        **({} if plan.secret else {"temperature": 1.0, "max_tokens": plan.new}),
    }
    rows = [
        BenchRow(SCENARIO, "functional", arm, setting, metrics, "", record_of_run) for arm, metrics in found.items()
    ]
    append_rows(options.out, rows)
    for row in rows:
        print(f"{row.arm}: {row.metrics}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
