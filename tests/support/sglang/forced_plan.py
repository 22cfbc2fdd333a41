"""A plugin for tests only: every step drafts as deep as a script says; what is drafted is written down, and faults are
planted into how a draft catches up with plain steps. Beside it, what the drafts should have been.

FORCED_PLAN names a file: empty, or JSON with `depths` of the steps, over and over, `most` plain steps until the draft
catches up, and a `fault`. FORCED_LOG names one that gets a JSON line per drafted step: `rids`, `lengths` of their
texts, `tokens`, of each the newest one of its text and its draft, `confidence`; and one per catching up: `caught_up`,
tokens of each request, and whether the step had `ended`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

DEPTHS = (0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 1, 0, 0, 0, 0, 0, 3)
MOST = 4
NEW_TOKENS, AT_ONCE = 40, 3
# so that requests do not come and go together
SPREAD = (0, 5, 11, 2, 17)
# Runs until one has something to show: which requests run beside each other hangs on when they come.
TRIES = 12
FAULTS = (
    "a_token_is_not_read",
    "positions_are_one_too_low",
    "hidden_states_are_of_the_token_before",
    "the_draft_begins_as_before",
    "the_seed_is_as_before",
    "at_the_bound_the_newest_token_is_forgotten",
)
# Of a text that has ended, keys that the draft has not written are a prefix for others.
HOLES = "keys_that_are_not_there_are_kept"
# Numbers summed in another order; a choice of the draft this near to another one may fall either way.
NEAR, CLOSE = 1e-3, 2e-3


def register() -> None:
    from c2t_plugin.engines.sglang import behind, results, worker

    path, log, most = Path(os.environ["FORCED_PLAN"]), Path(os.environ["FORCED_LOG"]), behind.MOST_STEPS
    now: dict[str, Any] = {"text": "", "fault": ""}
    mixin, kept = worker.DraftMixin, behind.Behind
    plan, draft, catch_up, seeds_of = worker.StepMixin.planned_depth, mixin.draft, mixin._catch_up, mixin._seeds_of
    late, skip, prefill, put = kept.late, kept.skip, kept._prefill, behind.Late.put
    read_by_the_draft = results.read_by_the_draft

    def write(**line: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def planned(self: Any, reqs: Any) -> int:
        depth, text, planner = plan(self, reqs), path.read_text(), self.c2t.planner
        if text != now["text"]:
            asked = json.loads(text) if text else {}
            now.update(text=text, depths=cycle(asked.get("depths", ())), fault=asked.get("fault", ""))
            behind.MOST_STEPS = asked.get("most", most)
        if text:
            depth = planner.depth = next(now["depths"])
            planner._open = False
        return depth

    def drafted(self: Any, batch: Any, *positional: Any, **keyword: Any) -> Any:
        found = draft(self, batch, *positional, **keyword)
        requests = len(batch.reqs)
        if now["text"]:
            write(
                rids=[req.rid for req in batch.reqs],
                lengths=(batch.seq_lens + 1).tolist(),
                tokens=found.draft_token.view(requests, -1).tolist(),
                confidence=self.c2t.scorer.confidence(requests).tolist(),
            )
        return found

    def handed_over(self: Any, batch: Any, ended: bool) -> Any:
        found = late(self, batch, ended)
        if now["text"] and found is not None:
            write(caught_up=found.batch.extend_lens, ended=ended)
        if found is not None and now["fault"] == FAULTS[2]:
            found = found._replace(hidden=found.hidden.roll(1, 0))
        return found

    def skipped(self: Any, batch: Any, result: Any) -> None:
        skip(self, batch, result)
        if now["fault"] == FAULTS[0] and len(self._tokens) == 2:
            for rows in (worker.record_of(req).missed.rows for req in batch.reqs):
                del rows[1:]

    def made(self: Any, batch: Any, tokens: Any, missed: Any, ended: int) -> Any:
        return prefill(self, batch, tokens, missed, ended - (now["fault"] == FAULTS[1]))

    def begun(self: Any, found: Any, draft_input: Any) -> None:
        if now["fault"] != FAULTS[3]:
            put(self, found, draft_input)

    def seeded(self: Any, batch: Any) -> Any:
        # a prompt's own batch has no confidences to compare yet
        stale = now["fault"] == FAULTS[4] and now.get("catching_up")
        return contextlib.nullcontext() if stale else seeds_of(self, batch)

    def caught_up(self: Any, batch: Any, draft_input: Any, ended: bool = False) -> None:
        now["catching_up"] = True
        catch_up(self, batch, draft_input, ended and now["fault"] != FAULTS[5])
        now["catching_up"] = False

    def with_holes(original: Any) -> Any:
        ours = read_by_the_draft(original)
        return lambda self: (original if now["fault"] == HOLES else ours)(self)

    worker.StepMixin.planned_depth, results.read_by_the_draft = planned, with_holes
    mixin.draft, mixin._catch_up, mixin._seeds_of = drafted, caught_up, seeded
    kept.late, kept.skip, kept._prefill, behind.Late.put = handed_over, skipped, made, begun


@dataclasses.dataclass
class Answered:
    """Under the script, of one run or several. steps: drafted ones. caught_up: lines of catching up."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    caught_up: Sequence[Mapping[str, Any]]

    def gives(self, texts: Sequence[tuple[int, ...]]) -> bool:
        """Whether the answers of each run begin so."""
        found = [tuple(answer["output_ids"][: len(texts[0])]) for answer in self.answers]
        return found == [*texts] * (len(found) // len(texts))

    def shows(self, whole: bool) -> bool:
        """Whether AT_ONCE requests have caught up together. whole: some of them unequally far behind, and the bound was
        reached, too."""
        lengths = [line["caught_up"] for line in self.caught_up]
        if max(map(len, lengths), default=0) != AT_ONCE:
            return False
        return not whole or (any(len(set(each)) > 1 for each in lengths) and any(e["ended"] for e in self.caught_up))


def answered(
    running: Any,
    prompts: Sequence[Sequence[int]],
    plan: Path,
    log: Path,
    fault: str = "",
    depths: Sequence[int] = DEPTHS,
    most: int = MOST,
    tries: int = TRIES,
) -> Answered:
    """Prompts answered, AT_ONCE at a time, by a server with this plugin."""
    from tests.support.sglang import verify_counts

    found = Answered([], [], [], [])
    for _ in range(tries):
        plan.write_text(json.dumps({"depths": depths, "most": most, "fault": fault}))
        log.write_text("")
        answers = verify_counts.answers(running, prompts, AT_ONCE, new_tokens=NEW_TOKENS, spread=SPREAD)
        plan.write_text("")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        steps, caught_up = ([line for line in lines if name in line] for name in ("rids", "caught_up"))
        # all of them are judged
        found = Answered(
            [*found.prompts, *prompts],
            [*found.answers, *answers],
            [*found.steps, *steps],
            [*found.caught_up, *caught_up],
        )
        if found.shows(whole=not fault):
            break
    return found


def continued(running: Any, prompts: Sequence[Sequence[int]], plan: Path, log: Path, fault: str = "") -> Answered:
    """Texts that plain steps have given, as prompts of drafted ones, which find them in the server's cache."""
    running.flush_cache()
    plain = answered(running, prompts, plan, log, fault, depths=(0,), most=2 * NEW_TOKENS, tries=1)
    texts = [[*prompt, *answer["output_ids"][:-1]] for prompt, answer in zip(prompts, plain.answers, strict=True)]
    found = answered(running, texts, plan, log, fault, depths=(2, 4, 1), tries=1)
    running.flush_cache()
    return found


@dataclasses.dataclass
class Judge:
    """What a draft says. target, draft: of simulate.py. rule: of verify_counts.py."""

    target: Any
    draft: Any
    rule: Any

    def wrong(self, found: Answered) -> tuple[int, int]:
        """How many drafts are not what the draft says behind the same text, and how many were looked at."""
        texts = {
            answer["meta_info"]["id"]: [*prompt, *answer["output_ids"]]
            for prompt, answer in zip(found.prompts, found.answers, strict=True)
        }
        states = {rid: self.target.run(text)[1] for rid, text in texts.items()}
        looked_at = []
        for step in found.steps:
            columns = (step[name] for name in ("rids", "lengths", "tokens", "confidence"))
            for rid, length, tokens, sure in zip(*columns, strict=True):
                # with overlap a request that has ended is in one more step
                if length <= len(texts[rid]):
                    looked_at.append(self._differs(texts[rid][:length], states[rid], tokens, sure))
        return looked_at.count(True), len(looked_at) - looked_at.count(None)

    def judge(self, found: Answered, fault: str = "") -> None:
        """Assert that drafts are right without a fault, and not with one, and that there was something to catch up."""
        differing, seen = self.wrong(found)
        assert (differing > 0) == bool(fault), f"{differing} of {seen} differ"
        assert seen > 20
        assert found.shows(whole=not fault), "all were as far behind, or the bound was never reached"

    def _differs(self, text: list[int], states: Any, tokens: list[int], sure: list[float]) -> bool | None:
        """None: that is too near to call."""
        assert tokens[0] == text[-1]
        features = self.draft.features([state[: len(text) - 1] for state in states])
        chain = self.draft.chain(text, features, len(tokens) - 1)
        best = chain.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) < NEAR:
            return None
        close = all(abs(a - b) < CLOSE for a, b in zip(sure, self.rule.confidences(chain), strict=True))
        return not (close and chain.argmax(-1).tolist() == tokens[1:])
