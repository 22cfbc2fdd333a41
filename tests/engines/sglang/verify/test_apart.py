"""`--speculative-c2t-verify-attention`: the target verifies by an attention of its own, and all else is as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]


from benchmarks.cpu_engine import SITE  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.config import C2TConfig  # noqa: E402
from c2t_plugin.engines.sglang.verify import backends, choice  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from tests.support.sglang import attention_twins, faults, flashinfer_wrapper, verifier_twins  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX = 4


class Backend:
    """Says who was asked."""

    def __init__(self, name: str, waits: bool = False, packs: str | None = None) -> None:
        self.name, self.needs_cpu_seq_lens, self.c2t_packing, self.graphs = name, waits, packs, 0
        self.supports_ragged_verify_graph = packs is not None
        self.prefill_attention_backend_str = self.decode_attention_backend_str = name
        self.kv_index_translator: Any = None

    def init_cuda_graph_state(self, *_: int) -> None:
        self.graphs += 1

    def forward(self, *_: Any, **__: Any) -> str:
        return self.name

    forward_decode = forward_extend = forward


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which imports SGLang's attention."""
    monkeypatch.syspath_prepend(str(SITE))
    from sglang.srt.layers.attention import hybrid_attn_backend

    from c2t_plugin.engines.sglang.verify import apart as module

    spec = SimpleNamespace(speculative_attention_mode="prefill", speculative_algorithm="EAGLE3")
    monkeypatch.setattr(hybrid_attn_backend, "get_spec", lambda: spec)
    monkeypatch.setattr(module, "PATCHES", SimpleNamespace(apply=lambda _: None))
    return module


@pytest.fixture
def registered(apart: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    return lambda name, factory: monkeypatch.setitem(apart.ATTENTION_BACKENDS, name, factory)


def runner(backend: Any, latent: bool = False) -> Any:
    bound: list[Any] = []
    return SimpleNamespace(
        **dict.fromkeys(("kv_cache_dtype", "token_to_kv_pool", "req_to_token_pool")),
        attn_backend=backend,
        use_mla_backend=latent,
        model_config=SimpleNamespace(context_len=8),
        kv_index_translator=SimpleNamespace(bind_and_verify_backends=bound.extend, bound=bound),
    )


def test_verification_alone_has_it(apart: Any, registered: Callable[[str, Any], None]):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    server, verifying = Backend("fa3"), Backend("triton", waits=True, packs="triton")
    registered("triton", lambda _: verifying)
    target = runner(server)
    apart.install("triton", target)
    found = target.attn_backend
    assert choice.verifier(found) is verifying and backends.packing_attention(verifying) == "triton"
    assert found.needs_cpu_seq_lens and found.supports_ragged_verify_graph
    assert found.prefill_attention_backend_str == found.decode_attention_backend_str == "fa3"
    asked = {mode: found.forward(forward_batch=SimpleNamespace(forward_mode=mode)) for mode in ForwardMode}
    assert {mode for mode, name in asked.items() if name == "triton"} == {ForwardMode.TARGET_VERIFY}
    assert found.forward_decode(*[None] * 5) == "fa3"
    found.init_cuda_graph_state(1, 1)
    assert (server.graphs, verifying.graphs) == (1, 1)
    assert target.kv_index_translator.bound == [found, verifying]


def test_a_server_that_verifies_so_already_stays_as_it_is(apart: Any, registered: Callable[[str, Any], None]):
    registered("triton", lambda _: pytest.fail("a second one was made"))
    target = runner(Backend("triton", packs="triton"))
    apart.install("triton", target)
    assert isinstance(target.attn_backend, Backend)


def test_so_has_each_depth_and_width(apart: Any, registered: Callable[[str, Any], None]):
    """Whose backends SGLang makes later, by a method of the target's runner; the draft's has its own."""
    registered("triton", lambda _: Backend("triton", packs="triton"))
    target, draft = (runner(Backend("fa3")) for _ in range(2))
    target.is_draft_worker, draft.is_draft_worker = False, True
    target.server_args = draft.server_args = SimpleNamespace(_c2t={"verify_attention": "triton"})
    make = apart.verifying_apart(lambda self, init_new_workspace=False: Backend("fa3", waits=init_new_workspace))
    assert choice.verifier(make(target, init_new_workspace=True)).name == "triton"
    assert make(draft, init_new_workspace=True).name == "fa3"


def needs_another_gpu(_: Any) -> Any:
    raise AssertionError("FlashAttention v3 Backend requires SM>=80 and SM<=90.")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (runner(Backend("trtllm_mla"), latent=True), "latent keys .* --speculative-attention-mode decode"),
        (
            runner(SimpleNamespace(linear_attn_backend=1, full_attn_backend=Backend("triton"))),
            "beside layers of linear attention",
        ),
        (runner(Backend("triton")), "requires SM>=80 and SM<=90"),
    ],
)
def test_where_it_cannot_be_had_one_line_says_why(
    apart: Any, registered: Callable[[str, Any], None], target: Any, reason: str
):
    registered("fa3", needs_another_gpu)
    with pytest.raises(ConfigError, match=f"--speculative-c2t-verify-attention fa3 cannot be had.*{reason}"):
        apart.install("fa3", target)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="verify_attention must be one of auto, triton, flashinfer, fa3, cpu"):
        C2TConfig(verify_attention="trtllm_mha")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("apart")
    target = Target(pair_dir() / "target")
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(3, min_tokens=96, seed=13), (17, 64, 33), strict=True)]
    plugins = folder / "plugins"
    plugins.mkdir()
    faults.install(plugins, verifier_twins.__file__, attention_twins, flashinfer_wrapper)
    return SimpleNamespace(
        folder=folder,
        plugins=plugins,
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
    )


def environment(setting: SimpleNamespace) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(setting.plugins), "TRITON_INTERPRET": "1", "C2T_SELF_CHECK": "strict"}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("fa3", ("--speculative-c2t-verify-attention", "fa3")),
        ("flashinfer", ("--speculative-c2t-verify-attention", "flashinfer")),
        # prefill and the draft too, as a server on an H100 has it
        ("fa3", ("--attention-backend", "fa3")),
    ],
    ids=["fa3", "flashinfer", "fa3 for all"],
)
def test_a_server_verifies_by_it(setting: SimpleNamespace, name: str, flags: tuple[str, ...]):
    """SGLang's own backend in a server, which is proved at start: only its kernel is a twin. Plain text, and counts of
    the simulation."""
    env, log = environment(setting), setting.folder / f"{name}{flags[0]}.log"
    with vc.server(pair_dir(), "eagle3", D_MAX, setting.classifier, log, *flags, env=env) as running:
        found = [vc.Counts.of_answer(answer) for answer in vc.answers(running, setting.prompts, len(setting.prompts))]
        state = running.request("/get_server_info")["internal_states"][0]["c2t"]["configuration"]
    text = log.read_text(errors="replace")
    assert f"planted: a twin of {name}'s kernel" in text and f"C2T: packed verification by {name}" in text
    assert (state["packing"], state["verify_attention"] == name) == (name, "verify-attention" in flags[0])
    assert state["self_check"]["failures"] == [] and state["self_check"]["proved"] == state["self_check"]["tiers"] > 1
    expected = [setting.oracle.counts("eagle3", prompt, D_MAX, setting.classifier) for prompt in setting.prompts]
    assert sum(each is not None for each in expected) >= 2
    assert all(theirs in (None, mine) for mine, theirs in zip(found, expected, strict=True))
    assert [count.output_ids for count in found] == setting.plain
