"""Packed verification and narrower windows through real servers: which rows the target computes, and what for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang import faults, ragged_faults, triton_verify  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX = 4
WIDTH = D_MAX + 1
PROMPTS = 8
CONCURRENCIES = (1, 8)
WIDTHS = (1, 2, 3, 5)
PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1, "ignore_eos": True}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("ragged")
    target = Target(pair_dir() / "target")
    lengths = [2, 5, 17, 33, 64, 81, 100, 120]
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(PROMPTS, min_tokens=96, seed=13), lengths, strict=True)]
    plugins = folder / "plugins"
    plugins.mkdir()
    return SimpleNamespace(
        folder=folder,
        plugins=str(faults.install(plugins, ragged_faults.__file__)),
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
    )


def serve(setting: SimpleNamespace, base: str, name: str, **env: str) -> CpuServer:
    env = {**os.environ, "PYTHONPATH": setting.plugins, "ROW_LOG": str(setting.folder / f"{name}.rows"), **env}
    return vc.server(pair_dir(), base, D_MAX, setting.classifier, setting.folder / f"{name}.log", env=env)


def forwards(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", params=vc.DRAFTS)
def served(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Answers and the target's verify forwards, by (how, concurrency); and answers with faults, by their names."""
    base = request.param
    answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    state, penalised, wrong = {}, {}, {}
    planted = setting.folder / f"{base}-planted"
    planted.write_text("")
    for how in ("off", "auto"):
        name = f"{base}-{how}"
        started = {"C2T_PACKING": how, "C2T_SELF_CHECK": "strict", "PLANTED_FAULT_FILE": str(planted)}
        with serve(setting, base, name, **started) as running:
            log = setting.folder / f"{name}.rows"
            for concurrency in CONCURRENCIES:
                log.write_text("")
                answers[how, concurrency] = vc.answers(running, setting.prompts, concurrency)
                rows[how, concurrency] = forwards(log)
            penalised[how] = running.generate_all(setting.prompts, max_new_tokens=vc.NEW_TOKENS, **PENALTIES)
            state[how] = running.request("/get_server_info")["internal_states"][0]["c2t"]
            for fault in ragged_faults.NARROWING if (base, how) == ("standalone", "off") else ():
                planted.write_text(fault)
                wrong[fault] = vc.answers(running, setting.prompts, PROMPTS)
                planted.write_text("")
    yield SimpleNamespace(base=base, answers=answers, rows=rows, state=state, penalised=penalised, wrong=wrong)


def told(answer: dict[str, Any]) -> dict[str, Any]:
    names = ("spec_verify_ct", "spec_accept_length", "spec_cap_lens_histogram", "spec_correct_drafts_histogram")
    return {"ids": answer["output_ids"], **{name: answer["meta_info"][name] for name in names}}


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_packed_equals_uniform(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    """Token for token, and in every accept length and verified length."""
    packed, uniform = ([told(a) for a in served.answers[how, concurrency]] for how in ("auto", "off"))
    assert [tuple(answer["ids"]) for answer in packed] == setting.plain
    assert packed == uniform


def test_penalties_reach_the_rows_that_they_are_for(served: SimpleNamespace):
    packed, uniform = ([told(answer) for answer in served.penalised[how]] for how in ("auto", "off"))
    assert packed == uniform
    assert [answer["ids"] for answer in packed] != [answer["output_ids"] for answer in served.answers["auto", 8]]


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_request_is_cut_where_the_classifier_says(
    served: SimpleNamespace, setting: SimpleNamespace, concurrency: int
):
    found = [vc.Counts.of_answer(answer) for answer in served.answers["auto", concurrency]]
    expected = [setting.oracle.counts(served.base, prompt, D_MAX, setting.classifier) for prompt in setting.prompts]
    decided = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None]
    assert len(decided) >= PROMPTS - 2, "too many confidences lie at beta: choose another"
    assert [mine for mine, _ in decided] == [theirs for _, theirs in decided]


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_the_target_computes_kept_rows_only(served: SimpleNamespace, concurrency: int):
    """Counted where the target is called: roots and kept tokens."""
    counts = [vc.Counts.of_answer(answer) for answer in served.answers["auto", concurrency]]
    packed = served.rows["auto", concurrency]
    for forward in packed:
        own = [kept + 1 for kept in forward["kept"]]
        assert len(own) == forward["requests"]
        assert forward["rows"] == sum(own)
        assert forward["lengths"] == own
    kept = sum((length + 1) * steps for count in counts for length, steps in count.draft_lengths)
    assert sum(kept + 1 for forward in packed for kept in forward["kept"]) == kept
    assert max(forward["requests"] for forward in packed) == concurrency
    window = sum(forward["requests"] for forward in packed) * WIDTH
    assert sum(forward["rows"] for forward in packed) < window * 0.9


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_the_uniform_window_is_as_wide_as_the_longest_chain_of_its_step(
    served: SimpleNamespace, setting: SimpleNamespace, concurrency: int
):
    """Rounded up to the next width. One at a time, simulation alone says how many rows that is."""
    uniform = served.rows["off", concurrency]
    for forward in uniform:
        assert forward["lengths"] is None
        assert forward["width"] == fitting(max(forward["kept"]))
        assert forward["rows"] == forward["requests"] * forward["width"]
    assert max(forward["requests"] for forward in uniform) == concurrency
    counts = [vc.Counts.of_answer(answer) for answer in served.answers["off", concurrency]]
    kept = sum(length * steps for count in counts for length, steps in count.draft_lengths)
    assert sum(sum(forward["kept"]) for forward in uniform) == kept
    computed = sum(forward["rows"] for forward in uniform)
    assert computed < sum(forward["requests"] for forward in uniform) * WIDTH
    if concurrency == 1:
        assert {forward["width"] for forward in uniform} == set(WIDTHS), "a width is never tried"
        expected = [setting.oracle.counts(served.base, prompt, D_MAX, setting.classifier) for prompt in setting.prompts]
        # where a confidence lies at beta, what the server says stands in for the simulation
        lengths = [(theirs or mine).draft_lengths for mine, theirs in zip(counts, expected, strict=True)]
        assert computed == sum(fitting(length) * steps for each in lengths for length, steps in each)


def fitting(kept: int) -> int:
    return min(width for width in WIDTHS if width >= kept + 1)


def test_the_server_says_which_one_runs(served: SimpleNamespace, setting: SimpleNamespace):
    logs = {how: (setting.folder / f"{served.base}-{how}.log").read_text(errors="replace") for how in ("off", "auto")}
    assert "C2T: verification over the uniform window (as asked for)" in logs["off"]
    assert "C2T: uniform window in widths 1, 2, 3, 5" in logs["off"]
    assert "C2T: uniform window" not in logs["auto"]
    assert served.state["off"]["configuration"]["widths"] == list(WIDTHS)
    assert "C2T: packed verification by cpu (attention backend RaggedCpuAttnBackend)" in logs["auto"]
    for how, ragged in (("off", "off"), ("auto", "cpu")):
        assert served.state[how]["configuration"]["packing"] == ragged
        own = sum(forward["rows"] for c in CONCURRENCIES for forward in served.rows[how, c])
        # SGLang warms itself up with a request of its own, and there are those with penalties
        assert served.state[how]["rows_computed"] >= own


def test_packed_rows_were_proved_at_start(served: SimpleNamespace):
    proved = served.state["auto"]["configuration"]["self_check"]
    assert (proved["failures"], proved["kernels"], proved["device"]) == ([], [], "cpu")
    assert set(proved["draft"]) == {"compared"} and proved["draft"]["compared"] > 1
    assert proved["proved"] == proved["tiers"] > 1 and proved["poison"]
    assert 0.0 <= proved["worst"] <= proved["allowed"] < 0.01
    # nothing is packed over the uniform window, so the kernels alone are
    assert served.state["off"]["configuration"]["self_check"]["tiers"] == 0


def test_a_window_of_the_wrong_tokens_is_caught(served: SimpleNamespace, setting: SimpleNamespace):
    right = [told(answer) for answer in served.answers["off", PROMPTS]]
    found = {fault: [told(answer) for answer in answers] for fault, answers in served.wrong.items()}
    assert right not in found.values()
    assert set(found) == (set(ragged_faults.NARROWING) if served.base == "standalone" else set())
    if found:
        cut_more = found[ragged_faults.a_bucket_one_too_small.__name__]
        assert [tuple(answer["ids"]) for answer in cut_more] == setting.plain


# --- faults


@pytest.fixture(scope="module")
def with_faults(setting: SimpleNamespace) -> Iterator[dict[str, list[vc.Counts]]]:
    """Counts of all prompts at once, by fault."""
    planted = setting.folder / "planted"
    planted.write_text("")
    found = {}
    with serve(setting, "standalone", "faults", PLANTED_FAULT_FILE=str(planted)) as running:
        for fault in ("", *ragged_faults.FAULTS):
            planted.write_text(fault)
            found[fault] = [vc.Counts.of_answer(a) for a in vc.answers(running, setting.prompts, PROMPTS)]
    yield found


@pytest.mark.parametrize("fault", ["", *ragged_faults.FAULTS])
def test_fault_is_caught(with_faults: dict[str, list[vc.Counts]], setting: SimpleNamespace, fault: str):
    expected = [setting.oracle.counts("standalone", prompt, D_MAX, setting.classifier) for prompt in setting.prompts]
    decided = [(mine, theirs) for mine, theirs in zip(with_faults[fault], expected, strict=True) if theirs is not None]
    assert all(mine == theirs for mine, theirs in decided) == (fault == "")
    # the draft's own keys never reach the output
    same_output = [found.output_ids for found in with_faults[fault]] == setting.plain
    assert same_output == (fault in ("", "out_cache_loc_not_restored"))


# --- the Triton backend


def test_triton_verifies_the_same(setting: SimpleNamespace, tmp_path: Path):
    """In Triton's interpreter: no GPU has seen this."""
    plugin = str(faults.install(tmp_path, triton_verify.__file__))
    chosen = slice(2, 5)
    prompts = setting.prompts[chosen]
    env = {**os.environ, "PYTHONPATH": plugin, "TRITON_INTERPRET": "1"}
    log = setting.folder / "triton.log"
    with vc.server(pair_dir(), "standalone", D_MAX, setting.classifier, log, env=env) as running:
        found = [vc.Counts.of_answer(answer) for answer in vc.answers(running, prompts, len(prompts))]
    text = log.read_text(errors="replace")
    assert "planted: the target verifies in Triton's interpreter" in text
    assert "C2T: packed verification by triton" in text
    assert found == [setting.oracle.counts("standalone", prompt, D_MAX, setting.classifier) for prompt in prompts]
    assert [count.output_ids for count in found] == setting.plain[chosen]


# --- a self-check that fails


def test_packed_rows_that_are_wrong_at_start_are_not_used(setting: SimpleNamespace):
    """The server starts over from the attention backends, and verifies windows of a few widths. Before that it has
    started over without a kernel that is wrong."""
    planted = setting.folder / "wrong-at-start"
    planted.write_text(ragged_faults.positions_off_by_one.__name__)
    env = {"C2T_SELF_CHECK": "on", "PLANTED_FAULT_FILE": str(planted), "PLANTED_KERNEL": "draft_stats"}
    with serve(setting, "standalone", "fallback", **env) as running:
        found = [told(answer) for answer in vc.answers(running, setting.prompts, PROMPTS)]
        state = running.request("/get_server_info")["internal_states"][0]["c2t"]["configuration"]
    assert [tuple(answer["ids"]) for answer in found] == setting.plain
    log = (setting.folder / "fallback.log").read_text(errors="replace")
    assert "C2T: self-check on cpu: packed verification on RaggedCpuAttnBackend is wrong: " in log
    assert "C2T: self-check on cpu: Triton kernel draft_stats off by 0.5, allowed " in log
    assert "C2T: uniform window in widths 1, 2, 3, 5" in log
    assert state["packing"] == "off" and state["widths"] == list(WIDTHS) and state["self_check"]["failures"]
