"""What is measured of a processor: a cost curve of a real, tiny model, and the rows that it fits."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.pairs.toy import SHIPPED
from benchmarks.report.rows import CURVE, PROCESSOR, PROCESSOR_METRICS
from benchmarks.serving import host
from c2t_plugin.errors import C2TError


def test_a_host_says_what_rows_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TRIAD_BYTES", 2**20)
    threads = torch.get_num_threads()
    found = host.measure_host(SHIPPED / "target", threads=1)
    assert torch.get_num_threads() == threads
    assert found.threads == 1 and found.cores == host.cores()
    assert set(found.setting) == set(PROCESSOR) and set(found.metrics) == set(PROCESSOR_METRICS)
    assert all(value > 0 for value in found.metrics.values())


def test_the_triad_counts_three_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_seconds", lambda do: do() is None or 0.5)
    assert host.triad_gb_per_s(4_000_000) == pytest.approx(3 * 4e6 / 0.5 / 1e9)


def test_a_curve_with_gaps_is_refused() -> None:
    with pytest.raises(C2TError, match="cost curve"):
        host.Host("a CPU", 2, 2, 10.0, dict.fromkeys(CURVE[:-1], 1.0))


def test_the_curve_is_of_passes_of_that_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Model:
        config = type("Config", (), {"vocab_size": 100})

        def eval(self) -> Model:
            return self

        def __call__(self, ids: torch.Tensor, use_cache: bool) -> None:
            assert ids.max() < 100 and not use_cache
            seen.append(ids.shape[-1])

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda path, dtype: Model())
    monkeypatch.setattr(host, "_pack", lambda model: seen.append(0))
    assert tuple(host.target_curve(Path("target"))) == CURVE
    assert seen == [0, *(tokens for tokens in CURVE for _ in range(host.REPEATS + 1))]


def test_wide_layers_multiply_as_the_cpu_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 520), torch.nn.Linear(520, 8, bias=False))
    given = torch.randn(2, 3, 600)
    with torch.inference_mode():
        before = model(given)
        host._pack(model)
        monkeypatch.setattr("torch.nn.functional.linear", None)
        assert model[0](given).shape == (2, 3, 520)
        monkeypatch.undo()
        torch.testing.assert_close(model(given), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("there", "sglang", "vllm"), [(1, 1, 1), (2, 2, 1), (16, 16, 15)])
def test_vllm_leaves_a_core_to_its_scheduler(
    monkeypatch: pytest.MonkeyPatch, there: int, sglang: int, vllm: int
) -> None:
    monkeypatch.setattr(host, "cores", lambda: there)
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine")
    host.add_threads(parser)
    assert [host.threads_of(parser.parse_args(["--engine", name])) for name in ("sglang", "vllm")] == [sglang, vllm]
    assert host.threads_of(parser.parse_args(["--engine", "vllm", "--threads", "3"])) == 3
