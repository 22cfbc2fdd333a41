"""What a draft has not read of plain steps: what is kept, for how long, and the pass that reads it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines import plain_steps  # noqa: E402
from c2t_plugin.engines.contract import broken_symbols, package_root  # noqa: E402
from c2t_plugin.engines.sglang import contract  # noqa: E402
from c2t_plugin.engines.sglang.step import Missed, record_of  # noqa: E402

SIZE, SLOTS, LONGEST = 4, 6, 40
LASTS = plain_steps.MOST_STEPS
# where each position of a request's keys is
PLACES = torch.arange(SLOTS * LONGEST).view(SLOTS, LONGEST).int()


@pytest.fixture
def behind(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang import behind

    return behind


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(rid=str(slot), kv=SimpleNamespace(cache_protected_len=3)) for slot in range(count)]


def batch_of(reqs: list[Any], lengths: list[int], on_host: bool = True) -> Any:
    """SGLang's, of requests in the slots that their names say."""
    slots = torch.tensor([int(req.rid) for req in reqs])
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices=slots,
        req_pool_indices_cpu=slots,
        req_to_token_pool=SimpleNamespace(req_to_token=PLACES),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths) if on_host else None,
        sampling_info=SimpleNamespace(grammars="all"),
        has_grammar=True,
        return_logprob=True,
    )


def state(token: int) -> torch.Tensor:
    """Of the target where it said this token."""
    return torch.full((SIZE,), float(token))


def result_of(tokens: list[int], hidden: bool = True) -> Any:
    states = torch.stack([state(token) for token in tokens]) if hidden else None
    return SimpleNamespace(
        next_token_ids=torch.tensor(tokens, dtype=torch.int32),
        logits_output=SimpleNamespace(hidden_states=states),
        next_draft_input=SimpleNamespace(),
    )


def input_of(requests: int, filled: float = 0.0) -> Any:
    return SimpleNamespace(
        topk_p=torch.full((requests, 1), filled),
        topk_index=torch.full((requests, 1), int(filled)),
        hidden_states=torch.full((requests, SIZE), filled),
    )


def step(kept: Any, reqs: list[Any], tokens: list[int], **how: Any) -> Any:
    draft_input, result = input_of(len(reqs)), result_of(tokens, **how)
    kept.begin(draft_input)
    kept.skip(SimpleNamespace(reqs=reqs), result)
    assert result.next_draft_input.topk_p is draft_input.topk_p
    assert result.next_draft_input.hidden_states is draft_input.hidden_states
    # as a graph's memory is by the next step
    if result.logits_output.hidden_states is not None:
        result.logits_output.hidden_states.fill_(-1)
    return result


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_one_pass_reads_what_each_request_has_missed(behind: Any, ended: bool, on_host: bool):
    kept, (one, two, three, four) = behind.Behind(SLOTS), requests(4)
    step(kept, [one, two], [10, 20])
    step(kept, [one, two, three], [11, 21, 31])
    # one ends, and a prompt is read
    step(kept, [two, three], [22, 32])
    late = kept.late(batch_of([four, three, two], [5 - ended, 9 - ended, 12 - ended], on_host), ended)
    made = late.batch
    assert made.reqs == [three, two] and late.rows.tolist() == [1, 2]
    assert made.req_pool_indices.tolist() == made.req_pool_indices_cpu.tolist() == [2, 1]
    assert made.seq_lens.tolist() == made.seq_lens_cpu.tolist() == [9, 12] and made.seq_lens_sum == 21
    assert (made.prefix_lens, made.extend_lens, made.extend_num_tokens) == ([7, 9], [2, 3], 5)
    # SGLang drops the first of each, and puts the newest behind the others
    assert made.input_ids.tolist() == [31, 31, 20, 20, 21] and late.tails.tolist() == [32, 22]
    assert torch.equal(late.hidden, torch.stack([state(token) for token in (31, 32, 20, 21, 22)]))
    assert made.out_cache_loc.tolist() == PLACES[[2, 2, 1, 1, 1], [7, 8, 9, 10, 11]].tolist()
    assert made.forward_mode.name == "EXTEND"
    assert (made.return_logprob, made.has_grammar, made.input_embeds) == (False, False, None)


def test_the_batch_at_hand_is_left_as_it_is(behind: Any):
    kept, reqs = behind.Behind(SLOTS), requests(2)
    step(kept, reqs, [10, 20])
    batch = batch_of(reqs, [5, 6])
    before = dict(vars(batch))
    late = kept.late(batch, ended=False)
    assert vars(batch) == before and late.rows is None
    late.batch.sampling_info.grammars = None
    assert batch.sampling_info.grammars == "all"


def test_drafts_that_read_no_states_need_none(behind: Any):
    """A client may have asked for those of some steps."""
    kept, reqs = behind.Behind(SLOTS, reads_states=False), requests(2)
    step(kept, reqs, [10, 20], hidden=True)
    step(kept, reqs, [11, 21], hidden=False)
    late = kept.late(batch_of(reqs, [5, 6]), ended=False)
    assert late.hidden is None and late.batch.extend_lens == [2, 2]


@pytest.mark.parametrize(("chunk", "steps"), [(7, 3), (1, 1), (1000, LASTS), (-1, LASTS), (None, LASTS)])
def test_no_more_is_kept_than_a_prefill_may_read(behind: Any, chunk: int | None, steps: int):
    kept, reqs, taken = behind.Behind(2, reads_states=False, chunk=chunk), requests(2), 0
    while not kept.full:
        step(kept, reqs, [10, 20], hidden=False)
        taken += 1
    assert taken == steps


@pytest.mark.parametrize(("reads_states", "most"), [(True, ["copy_", "slice"]), (False, [])])
def test_a_plain_step_copies_its_states_and_launches_nothing_else(behind: Any, reads_states: bool, most: list[str]):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(called.overloadpacket.__name__)
            return called(*args, **kwargs or {})

    names: list[str] = []
    kept, reqs = behind.Behind(SLOTS, reads_states), requests(3)
    step(kept, reqs, [1, 2, 3])
    kept.begin(input_of(3))
    batch, result = SimpleNamespace(reqs=reqs), result_of([4, 5, 6])
    with Seen():
        kept.skip(batch, result)
    assert sorted(names) == most


def test_nothing_is_read_twice(behind: Any):
    kept, reqs = behind.Behind(SLOTS), requests(2)
    assert kept.late(batch_of(reqs, [5, 6]), ended=False) is None
    step(kept, reqs, [10, 20])
    assert kept.late(batch_of(reqs, [5, 6]), ended=False) is not None
    assert kept.late(batch_of(reqs, [5, 6]), ended=False) is None
    step(kept, reqs, [11, 21])
    assert kept.late(batch_of(reqs, [6, 7]), ended=False).batch.input_ids.tolist() == [11, 21]


def test_one_that_was_away_while_others_caught_up_is_not_given_their_tokens(behind: Any):
    kept, (one, two) = behind.Behind(SLOTS), requests(2)
    step(kept, [one, two], [10, 20])
    assert kept.late(batch_of([one], [5]), ended=False) is not None
    step(kept, [one, two], [11, 21])
    assert kept.late(batch_of([one, two], [6, 9]), ended=False).batch.extend_lens == [1, 1]


def test_it_is_full_after_some_steps(behind: Any):
    kept, reqs = behind.Behind(SLOTS), requests(2)
    for token in range(behind.MOST_STEPS):
        assert not kept.full
        step(kept, reqs, [token, token])
    assert kept.full
    kept.late(batch_of(reqs, [30, 30]), ended=True)
    assert not kept.full


def test_and_when_as_much_memory_is_used_as_may_be(behind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_steps, "MOST_BYTES", 4 * SIZE * (SLOTS + 5))
    kept, reqs = behind.Behind(SLOTS), requests(3)
    step(kept, reqs, [1, 2, 3])
    assert kept._hidden.nbytes == plain_steps.MOST_BYTES
    assert not kept.full
    step(kept, reqs, [4, 5, 6])
    # one of the largest batch would not fit
    assert kept.full
    # and there is room for that in any case
    monkeypatch.setattr(plain_steps, "MOST_BYTES", 1)
    small = behind.Behind(SLOTS)
    step(small, requests(SLOTS), list(range(SLOTS)))
    assert small.full


def test_the_next_draft_begins_with_what_the_pass_gave(behind: Any):
    late = behind.Late(None, None, torch.zeros(2), torch.tensor([2, 0]))
    draft_input, found = input_of(3, 1.0), input_of(2)
    found.topk_p, found.topk_index = torch.tensor([[0.25], [0.5]]), torch.tensor([[7], [8]])
    found.hidden_states = torch.stack([state(5), state(6)])
    shared = draft_input.topk_p
    late.put(found, draft_input)
    assert draft_input.topk_index.flatten().tolist() == [8, 1, 7]
    assert draft_input.topk_p.flatten().tolist() == [0.5, 1.0, 0.25]
    assert draft_input.hidden_states[:, 0].tolist() == [6.0, 1.0, 5.0]
    assert shared.flatten().tolist() == [1.0] * 3, "SGLang's own tensors are left alone"
    # all of them; a stand-alone draft has no states
    found.hidden_states = None
    late._replace(rows=None).put(found, draft_input)
    assert draft_input.topk_index is found.topk_index and draft_input.hidden_states is not None


@pytest.mark.parametrize(("owned", "missed", "expected"), [(30, 4, 26), (30, 0, 30), (4, 3, 3), (2, 3, 2)])
def test_what_it_has_not_read_is_no_prefix_for_others(behind: Any, owned: int, missed: int, expected: int):
    """Not below what the cache has of the prompt."""
    req = requests(1)[0]
    from c2t_plugin.engines.sglang.results import read_by_the_draft

    owned_kv_len = read_by_the_draft(lambda self: owned)
    assert owned_kv_len(req) == owned
    record_of(req).missed = Missed(0, list(range(missed)))
    assert owned_kv_len(req) == expected


FIT = {"disaggregation_mode": "null", "enable_mixed_chunk": False, "enable_streaming_session": False}


@pytest.mark.parametrize(
    ("arguments", "axes", "seeded", "reason"),
    [
        ({}, False, False, ""),
        ({"disaggregation_mode": "decode"}, False, False, "disaggregation"),
        ({"enable_mixed_chunk": True}, False, False, "chunks"),
        ({"enable_streaming_session": True}, False, False, "sessions"),
        ({}, True, False, "axes"),
        ({}, False, True, "seeded"),
    ],
)
def test_where_it_cannot_be_done_each_step_is_read(
    behind: Any, arguments: dict[str, Any], axes: bool, seeded: bool, reason: str, monkeypatch: pytest.MonkeyPatch
):
    draft = SimpleNamespace(
        draft_runner=SimpleNamespace(model_config=SimpleNamespace(model_is_mrope=axes)),
        seed_dsa_topk_from_draft_extend=seeded,
    )
    from c2t_plugin.engines.sglang import behind_refused

    server_args = SimpleNamespace(**FIT | arguments)
    monkeypatch.setattr(contract, "missing_for_plain_steps", list)
    found = behind_refused.why(server_args, draft)
    assert reason in found and bool(reason) == bool(found)
    monkeypatch.setattr(contract, "missing_for_plain_steps", lambda: ["Req.owned_kv_len (not found)"])
    assert "owned_kv_len" in behind_refused.why(server_args, draft)
    monkeypatch.setattr(contract, "missing_for_plain_steps", list)
    monkeypatch.setattr("c2t_plugin.engines.sglang.ranks.apart", lambda: True)
    assert bool(reason) or behind_refused.why(server_args, draft).startswith("DP attention")


def test_the_installed_release_has_what_it_takes(tmp_path: Path):
    root = package_root("sglang")
    assert contract.missing_for_plain_steps() == []
    file = "srt/managers/schedule_batch.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text((root / file).read_text().replace("def owned_kv_len(", "def kept_kv_len("))
    asked = [symbol for symbol in contract.PLAIN_SYMBOLS if symbol.file == file]
    assert len(broken_symbols(tmp_path, asked)) == 1
