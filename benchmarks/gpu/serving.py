"""SGLang end to end with a target of realistic cost: the arms of `benchmarks.serving.throughput`.

    python -m benchmarks.gpu.serving --out OUT --seconds 500     on a GPU
    python -m benchmarks.gpu.serving --out OUT --compare trees    C2T's trees with the engine's own, then the goals
    python -m benchmarks.gpu.serving --out OUT --dry-run         tiny, on the CPU engine: it works

writes the inflated pair (`benchmarks.pairs.inflated`) to --models unless it is there, then starts one server after
another with it: outputs and counts first, one request at a time, then throughput by concurrency. A server that does
not start gets a row with the reason and the others go on; what there is no time for gets a row too. Rows go to
OUT/serving.jsonl, those of C2T's checks at start to OUT/self-check.jsonl. Exit status 1: an arm or a check failed, or a
count that must agree does not. Every server is stopped before the next starts.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import self_checks
from benchmarks.gpu.contests import COMPARISONS, LONG_PREFIX, Entry, fitting
from benchmarks.gpu.environment import FLAGS, plugin_environment
from benchmarks.gpu.options import part_parser
from benchmarks.gpu.tree_goals import summary
from benchmarks.pairs.inflated.command import PRESETS, inflate
from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.report.rows import BenchRow, append_rows, read_rows
from benchmarks.serving.client import Client, Pass
from benchmarks.serving.closed_forms import write_closed_forms
from benchmarks.serving.decode_log import decoding, largest_batch, logged
from benchmarks.serving.engines import ENGINES, Device
from benchmarks.serving.engines.sglang import NativeClient
from benchmarks.serving.measuring import warm_up
from benchmarks.serving.scenarios import CONCURRENCIES
from benchmarks.serving.server import Runner, Server
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

Setting = str | int | float | None

ROWS = "serving.jsonl"
SEED = 0
START_TIMEOUT_S = 240.0
# the small target's greedy text loops soon after, and loops are easy to draft
MAX_TOKENS = 40
IDENTITY_PROMPTS = 16
DRY_CONCURRENCIES = (2,)
PROMPTS_PER_SLOT = 2
DRY_PROMPTS = 4
# tokens of a prompt of the pair, its answer, and what a step writes ahead
ROOM = 2048
# Of the requests at once: a batch of short answers is seldom whole, since some are being prefilled
FULL_BATCH = 0.9
# Of two arms that must accept the same: with equal outputs too, bfloat16 may turn a tie between draft tokens.
SAME_TAU = 0.1
# by the beginning of a ratio's name, what it is of
RATES = {"ratio_to": "output_tokens_per_s", "decode_ratio_to": "decode_tokens_per_s"}


class Measurements:
    """One run: its prompts, the outputs of plain decoding, rows as they come."""

    def __init__(self, out: Path, models: Path, target: str, prefix: int, dry_run: bool) -> None:
        self.out, self.models, self.dry_run = out, models, dry_run
        self.kind = "functional" if dry_run else "measured"
        self.per_slot = 1 if prefix > LONG_PREFIX else PROMPTS_PER_SLOT
        self.prompts = prompts_of(DRY_PROMPTS if dry_run else self.per_slot * max(CONCURRENCIES), prefix)
        self.setting: dict[str, Setting] = {
            "target": target,
            "dtype": "float32" if dry_run else "bfloat16",
            "prefix": prefix,
            "output_tokens": MAX_TOKENS,
        }
        self.record = RunRecord.capture(seed=SEED).to_json()
        self.plain: Pass | None = None
        # by draft steps
        self.static: dict[int, Pass] = {}
        # of every pass, by arm and concurrency
        self.measured: dict[tuple[str, int], Mapping[str, float | None]] = {}
        self.faults: list[str] = []

    def row(self, arm: str, metrics: Mapping[str, float | None], error: str = "", **setting: Setting) -> None:
        """Append one, and print it."""
        whole = {**self.setting, **setting}
        append_rows(self.out / ROWS, [BenchRow("gpu-serving", self.kind, arm, whole, metrics, error, self.record)])
        shown = " ".join(f"{name}={value:.4g}" for name, value in metrics.items() if value is not None)
        where = " ".join(f"{name}={value}" for name, value in setting.items() if value is not None)
        print(f"{arm:<18} {where:<42} {shown}{error}", flush=True)
        if error:
            self.faults.append(f"{arm}: {error}")

    def serve(self, arm: Entry, server: Server) -> None:
        """Start a server, compare it with the others, measure it, stop it."""
        began = time.monotonic()
        with server as running, NativeClient(running.base_url, MAX_TOKENS) as client:
            started = time.monotonic() - began
            if arm.in_table.c2t:
                checked = self_checks.rows_of(client.c2t_state(), arm.name, self.kind, self.setting, self.record)
                append_rows(self.out / self_checks.ROWS, checked)
                self.faults += [f"{arm.name}: {row.error}" for row in checked if row.error]
            for beta in arm.betas:
                if beta is not None:
                    client.control(beta, arm.steps)
                elif arm.controlled:
                    # an earlier beta of this server stays until it is replaced
                    client.control(self.own_beta(client), arm.steps)
                used = round(client.c2t_state()["beta"], 6) if arm.controlled else None
                self.compare(arm, client, used, started)
                for concurrency in DRY_CONCURRENCIES if self.dry_run else arm.concurrencies:
                    self.throughput(arm, client, used, concurrency, server.log)

    def own_beta(self, client: Client) -> float:
        """The threshold that the classifier file beside the draft suggests."""
        from c2t_plugin.classifier import FILE_NAME, load_classifier

        return load_classifier(self.models / "eagle3" / FILE_NAME).spec.suggested_beta

    def compare(self, arm: Entry, client: Client, beta: float | None, started: float) -> None:
        """Outputs against plain decoding's, one request at a time; beta 0 accepts what the static chain accepts."""
        found = client.run(self.prompts[:IDENTITY_PROMPTS], 1, lambda: None)
        self.plain = self.plain or found
        identical, of = found.n_identical(self.plain), len(found.completions)
        metrics = {"identical_share": identical / of, "tau": found.tau, "verify_steps": found.verify_steps}
        self.row(_named(arm, beta), {**metrics, "start_s": started}, check="outputs")
        if self.dry_run and identical != of:
            self.faults.append(f"{arm.name}: {identical} of {of} outputs are plain decoding's")
        if arm.name.startswith("static"):
            self.static[arm.steps] = found
        if beta == 0.0 and arm.steps in self.static:
            self.agree(arm, found, self.static[arm.steps])

    def agree(self, arm: Entry, uncut: Pass, static: Pass) -> None:
        """Where the outputs are the same tokens, both passes have to accept as many at a step."""
        same = [a.token_ids == b.token_ids for a, b in zip(uncut.completions, static.completions, strict=True)]
        ours, theirs = (Pass(tuple(itertools.compress(one.completions, same)), 0.0).tau for one in (uncut, static))
        if not _close(ours, theirs, 0.0 if self.dry_run else SAME_TAU):
            says = f"beta 0 accepts {ours} tokens a step, the static chain {theirs}, over {sum(same)} equal outputs"
            self.faults.append(f"{arm.name}: {says}")

    def throughput(self, arm: Entry, client: Client, beta: float | None, concurrency: int, log: Path) -> None:
        """A pass at full batches; the largest batch that the server's log shows is in the row."""
        prompts = self.prompts[: max(IDENTITY_PROMPTS, self.per_slot * concurrency)]
        warmed = warm_up(client, prompts, (concurrency, 0.0), arm.in_table.warm_ups)
        read = log.stat().st_size
        found = client.run(prompts, concurrency, lambda: None)
        text = logged(log, read)
        ran = largest_batch(text)
        if not self.dry_run and ran is not None and ran < FULL_BATCH * min(concurrency, len(prompts)):
            short = f"only {ran} of {concurrency} requests ever ran at once"
            self.row(_named(arm, beta), {}, short, check="throughput", concurrency=concurrency)
            return
        gamma = found.gamma_per_token if arm.in_table.counted else None
        speeds = {"output_tokens_per_s": found.output_tokens / found.seconds, **decoding(text)}
        self.measured[_named(arm, beta), concurrency] = speeds
        metrics = {
            **speeds,
            **_ratios(speeds, self.measured.get(("plain", concurrency), {}), "plain"),
            "seconds": found.seconds,
            "tau": found.tau,
            "gamma_per_token": gamma,
            "gamma": None if gamma is None else _over(gamma * found.output_tokens, found.verify_steps or None),
            "verify_steps": found.verify_steps,
            "ran_at_once": ran,
            "device_memory_gb": used_gb(),
            "passes": 1,
            "warm_up": warmed,
        }
        self.row(_named(arm, beta), metrics, check="throughput", concurrency=concurrency)

    def against_static(self) -> None:
        """A row for every pass against the fastest static chain, which is known once all of them have run."""
        for (name, load), speeds in self.measured.items():
            rivals = [each for (rival, at), each in self.measured.items() if at == load and rival.startswith("static")]
            if rivals:
                best = {rate: max(each[rate] or 0.0 for each in rivals) or None for rate in RATES.values()}
                found = {**_ratios(speeds, best, "best_static"), "static_chains": len(rivals)}
                self.row(name, found, check="best static", concurrency=load)


def used_gb() -> float | None:
    """Memory of the GPU that is in use, by whatever process; the server gives none of its own back."""
    if not torch.cuda.is_available():
        return None
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 1e9


def _named(arm: Entry, beta: float | None) -> str:
    return arm.name if beta is None else f"{arm.name}, beta {beta:g}"


def _over(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs


def _ratios(
    mine: Mapping[str, float | None], theirs: Mapping[str, float | None], rival: str
) -> dict[str, float | None]:
    return {f"{ratio}_{rival}": _over(mine[rate], theirs.get(rate)) for ratio, rate in RATES.items()}


def _close(found: float | None, expected: float | None, tolerance: float) -> bool:
    return found is not None and expected is not None and abs(found - expected) <= tolerance * expected


def prompts_of(n: int, prefix: int) -> list[list[int]]:
    """n prompts of token ids, each with at least `prefix` tokens of other held-out prompts in front of it.

    The pair has fewer prompts than a large batch takes; then they repeat, which needs a server without a prefix cache.
    """
    known = held_out_prompts(200, seed=SEED)
    prompts = []
    for i in range(n):
        own, others = known[i % len(known)], itertools.cycle(known[(i + 1) % len(known) :] + known)
        front: list[int] = []
        while len(front) < prefix:
            front += next(others)
        prompts.append([*front[:prefix], *own])
    return prompts


def build(models: Path, preset: str, dry_run: bool, source: Path | None = None) -> None:
    """Write the inflated pair, unless it is there. source: folder of the small one, None for the pair in use."""
    dtype = torch.float32 if dry_run else torch.bfloat16
    for kind in ("target", "eagle3"):
        if not (models / kind).is_dir():
            device = "cpu" if dry_run else "cuda"
            inflate(kind, PRESETS[preset], source or pair_dir(), models, device=device, dtype=dtype, seed=SEED)
    write_closed_forms(models)
    if not dry_run:
        # the servers need what the building took
        torch.cuda.empty_cache()


def runner_of(target: Path, out: Path, scratch: Path | None, prefix: int = 0) -> Runner:
    """Starts servers on a GPU with the plugin's entry point in `scratch`, on the CPU engine without one."""
    if scratch is None:
        return Runner(ENGINES["sglang"], Device.CPU, target, out, start_timeout=START_TIMEOUT_S)
    environment = plugin_environment(scratch)
    # the engine's tables of positions are as long as the longest text that it may get
    flags = (*FLAGS, "--context-length", str(prefix + ROOM))
    return Runner(ENGINES["sglang"], Device.GPU, target, out, flags, environment, START_TIMEOUT_S)


def run(measurements: Measurements, arms: Sequence[Entry], runner: Runner, deadline: float) -> None:
    """Every arm while there is time for one as long as the longest so far."""
    longest = 0.0
    for arm in arms:
        began = time.monotonic()
        if began + longest > deadline:
            measurements.row(arm.name, {}, "not run: out of time")
            continue
        try:
            measurements.serve(arm, arm.server(runner, measurements.models))
        except (C2TError, LookupError) as error:
            # a lookup fails where a server's answer lacks what it should hold
            measurements.row(arm.name, {}, " ".join(f"{type(error).__name__}: {error}".split()))
        longest = max(longest, time.monotonic() - began)


def main(argv: list[str]) -> int:
    """Build, serve, compare, measure."""
    parser = part_parser("benchmarks.gpu.serving", __doc__, "tiny, float32, on the CPU engine")
    parser.add_argument("--models", type=Path, help="folder of the inflated pair, kept; without it OUT/models")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="8b, or tiny in a dry run, without it")
    parser.add_argument("--prefix", type=int, default=0, help="tokens in front of every prompt, e.g. 512 or 8192")
    parser.add_argument("--compare", choices=sorted(COMPARISONS), default="chains", help="which arms (default: chains)")
    names = sorted({arm.name for arms, _ in COMPARISONS.values() for arm in arms})
    parser.add_argument("--arms", nargs="+", choices=names, help="these of them alone, plain among them")
    parser.add_argument("--concurrencies", nargs="+", type=int, metavar="N", help="these alone, of each arm's")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    preset = options.preset or ("tiny" if options.dry_run else "8b")
    models = options.models or options.out / "models"
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            build(models, preset, options.dry_run)
        except C2TError as error:
            print(f"gpu.serving: {error}", file=sys.stderr)
            return 2
        runner = runner_of(models / "target", options.out, None if options.dry_run else Path(scratch), options.prefix)
        measurements = Measurements(options.out, models, preset, options.prefix, options.dry_run)
        arms = fitting(COMPARISONS[options.compare][options.dry_run], options.prefix, options.concurrencies)
        run(measurements, [arm for arm in arms if arm.name in (options.arms or [arm.name])], runner, deadline)
    measurements.against_static()
    if options.compare == "trees":
        print(summary(read_rows(options.out / ROWS, BenchRow)))
    for fault in measurements.faults:
        print(f"FAULT: {fault}")
    return int(bool(measurements.faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
