"""Trees of different sizes in one batch: each request's own nodes computed, and the padded form's tokens and counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang.test_packed_server import forwards, told  # noqa: E402
from tests.engines.sglang.test_tree_counts import tree_server  # noqa: E402
from tests.support.sglang import (  # noqa: E402
    attention_twins,
    faults,
    flashinfer_wrapper,
    ragged_faults,
    triton_verify,
    verifier_twins,
)
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

BASE, TOPK, DEPTH, BETA = "eagle3", 4, 5, 0.1
PROMPTS = 8
CONCURRENCIES = (1, 8)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("ragged-trees")
    plugins = folder / "plugins"
    plugins.mkdir()
    target = Target(pair_dir() / "target")
    lengths = [2, 5, 17, 33, 64, 81, 100, 120]
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(PROMPTS, min_tokens=120, seed=17), lengths, strict=True)]
    return SimpleNamespace(
        folder=folder,
        plugins=str(faults.install(plugins, ragged_faults.__file__)),
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
    )


def serve(setting: SimpleNamespace, how: str, **env: str) -> Any:
    env = {**os.environ, "PYTHONPATH": setting.plugins, "ROW_LOG": str(setting.folder / f"{how}.rows"), **env}
    return tree_server(BASE, TOPK, DEPTH, None, setting.classifier, setting.folder / f"{how}.log", env=env)


@pytest.fixture(scope="module")
def served(setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Answers and the target's verify forwards, by (how, concurrency); the server that packs stays up for faults."""
    answers: dict[tuple[str, int], list[dict[str, Any]]] = {}
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    switch = setting.folder / "planted"
    switch.write_text("")

    def ask(running: Any, how: str) -> None:
        vc.control(running, beta=BETA)
        log = setting.folder / f"{how}.rows"
        for concurrency in CONCURRENCIES:
            log.write_text("")
            answers[how, concurrency] = vc.answers(running, setting.prompts, concurrency)
            rows[how, concurrency] = forwards(log)

    with serve(setting, "off", C2T_PACKING="off") as running:
        ask(running, "off")
    with serve(setting, "auto", PLANTED_FAULT_FILE=str(switch), C2T_SELF_CHECK="strict") as running:
        ask(running, "auto")
        yield SimpleNamespace(answers=answers, rows=rows, running=running, switch=switch)


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_packed_equals_padded(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    """Token for token, and in every accept length and tree size."""
    packed, padded = ([told(a) for a in served.answers[how, concurrency]] for how in ("auto", "off"))
    assert [tuple(answer["ids"]) for answer in packed] == setting.plain
    assert packed == padded


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_the_target_computes_the_nodes_of_each_tree_only(served: SimpleNamespace, concurrency: int):
    """Counted where the target is called: the trees' sizes and their sum."""
    counts = [vc.Counts.of_answer(answer) for answer in served.answers["auto", concurrency]]
    packed, padded = served.rows["auto", concurrency], served.rows["off", concurrency]
    for forward in packed:
        needed = sum(forward["lengths"])
        assert len(forward["lengths"]) == forward["requests"]
        assert forward["rows"] == needed
    nodes = sum((size + 1) * steps for count in counts for size, steps in count.draft_lengths)
    assert sum(sum(forward["lengths"]) for forward in packed) == nodes
    assert all(forward["rows"] == forward["requests"] * forward["width"] for forward in padded)
    assert {forward["lengths"] is None for forward in padded} == {True}
    assert max(forward["requests"] for forward in packed) == concurrency
    computed, uniform = (sum(forward["rows"] for forward in found) for found in (packed, padded))
    assert computed < uniform * (1.0 if concurrency == 1 else 0.8), "a window of one request is nearly its tree"
    if concurrency > 1:
        assert max(len(set(forward["lengths"])) for forward in packed) > 3, "trees of one size say nothing"
        # powers of 2, from 2 on
        buckets = [{max(1, (length - 1).bit_length()) for length in forward["lengths"]} for forward in packed]
        assert max(map(len, buckets)) > 2, "no batch has trees of different buckets"


def test_the_log_says_which_one_runs(served: SimpleNamespace, setting: SimpleNamespace):
    logs = {how: (setting.folder / f"{how}.log").read_text(errors="replace") for how in ("off", "auto")}
    assert "C2T: verification over the uniform window (as asked for)" in logs["off"]
    assert "C2T: packed verification by cpu (attention backend RaggedCpuAttnBackend)" in logs["auto"]


@pytest.mark.parametrize("fault", ragged_faults.TREE_FAULTS)
def test_fault_is_caught(served: SimpleNamespace, setting: SimpleNamespace, fault: str):
    served.switch.write_text(fault)
    try:
        answers = vc.answers(served.running, setting.prompts, PROMPTS)
    finally:
        served.switch.write_text("")
    # slots that are wrong reach the output too, since the keys of the accepted path are moved by them
    assert [tuple(answer["output_ids"]) for answer in answers] != setting.plain


@pytest.mark.parametrize("kernel", ["stock", "tree"])
def test_triton_verifies_the_same(setting: SimpleNamespace, served: SimpleNamespace, tmp_path: Path, kernel: str):
    """In Triton's interpreter, every other step as a captured graph would: no GPU has seen this."""
    chosen = slice(1, 3)
    prompts = setting.prompts[chosen]
    env = {"PYTHONPATH": str(faults.install(tmp_path, triton_verify.__file__)), "TRITON_INTERPRET": "1"}
    with serve(setting, f"triton-{kernel}", C2T_ATTENTION=kernel, **env) as running:
        vc.control(running, beta=BETA)
        answers = vc.answers(running, prompts, len(prompts))
    text = (setting.folder / f"triton-{kernel}.log").read_text(errors="replace")
    assert "planted: the target verifies in Triton's interpreter" in text
    assert "C2T: packed verification by triton" in text
    assert f"kernel {kernel})" in text and f'"attention": "{kernel}"' in text
    assert [told(a) for a in answers] == [told(a) for a in served.answers["off", PROMPTS][chosen]]


@pytest.mark.parametrize(
    ("name", "backend"), [("fa3", "PackedFa3Backend"), ("flashinfer", "PackedFlashInferAttnBackend")]
)
def test_sglangs_own_attention_verifies_the_same(
    setting: SimpleNamespace, served: SimpleNamespace, tmp_path: Path, name: str, backend: str
):
    """On twins of the kernels, in eager mode: neither those nor a GPU has seen this."""
    chosen = slice(1, 3)
    prompts = setting.prompts[chosen]
    plugin = faults.install(tmp_path, verifier_twins.__file__, attention_twins, flashinfer_wrapper)
    env = {"PYTHONPATH": str(plugin), "TRITON_INTERPRET": "1", "C2T_VERIFY_ATTENTION": name}
    with serve(setting, name, **env) as running:
        vc.control(running, beta=BETA)
        answers = vc.answers(running, prompts, len(prompts))
    text = (setting.folder / f"{name}.log").read_text(errors="replace")
    assert f"planted: a twin of {name}'s kernel" in text
    assert f"C2T: packed verification by {name} (attention backend {backend})" in text
    assert [told(a) for a in answers] == [told(a) for a in served.answers["off", PROMPTS][chosen]]
