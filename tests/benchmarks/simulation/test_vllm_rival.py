"""C2T against vLLM's estimator at equal budgets: the figures by hand, by resampling, and the command."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.simulation import vllm_rival
from benchmarks.simulation.vllm_rival import BUDGETS, figures, main
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.traces.file import save_traces

ONCE = np.ones((1, 1))


def test_figures_of_a_handful_of_tokens():
    survival = torch.tensor([[0.9, 0.7, 0.1, 0.05, 0.01], [0.8, 0.6, 0.5, 0.2, 0.02]])
    accepted = torch.tensor([[True, True, False, False, False], [True, False, False, False, False]])
    found = figures(survival, accepted, torch.zeros(2, dtype=torch.int64), ONCE)
    # the best two tokens of ten are accepted, three of the best four, and of the best six
    assert [values[0] for values in found.recall] == pytest.approx([2 / 3, 1.0, 1.0])
    assert [values[0] for values in found.accepted] == pytest.approx([1.0, 3 / 4, 1 / 2])
    right = [0.9, 0.7, 0.8], [0.1, 0.05, 0.01, 0.6, 0.5, 0.2, 0.02]
    assert found.nll[0] == pytest.approx(-(np.log(right[0]).sum() + np.log1p(-np.array(right[1])).sum()) / 10)
    assert found.auc[0] == 1.0


def test_a_prompt_drawn_twice_counts_as_if_it_were_there_twice():
    generator = torch.Generator().manual_seed(0)
    survival = torch.rand((20, 5), generator=generator).cummin(dim=1).values
    accepted = (torch.rand((20, 5), generator=generator) < survival).int().cumprod(1).bool()
    owner = torch.arange(20) // 5
    drawn = np.array([[2.0, 0.0, 1.0, 1.0]])
    rows = torch.cat([torch.arange(5), torch.arange(5), torch.arange(10, 20)])
    weighted = figures(survival, accepted, owner, drawn)
    copied = figures(survival[rows], accepted[rows], torch.zeros(20, dtype=torch.int64), ONCE)
    for one, other in zip(weighted.columns(), copied.columns(), strict=True):
        assert one == pytest.approx(other)


@pytest.fixture
def files(make_traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(vllm_rival, "ESTIMATOR_BATCH", 1)
    torch.manual_seed(0)
    save_classifier(NodeClassifier(ClassifierSpec(top_m=4)), tmp_path / "c.safetensors")
    save_traces(make_traces(prompts=30, steps=8, k=3), tmp_path / "t.traces")
    both = [str(tmp_path / "t.traces")] * 2
    return [str(tmp_path / "c.safetensors"), "--traces", both[0], "--rivals-from", both[1], "--d-max", "3"]


def test_the_command_prints_every_figure_with_intervals(files: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*files, "--replicates", "20"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("240 chains of 3 of 30 prompts")
    for row in ("AUC", "NLL", *(f"recall, {share:.0%}" for share in BUDGETS)):
        (line,) = re.findall(rf"^\| {row} \|.*$", printed, re.MULTILINE)
        assert line.count(" to ") == 2


def test_bad_traces_are_one_line(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "t.traces").write_text("none")
    assert main(files) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm_rival: ")
