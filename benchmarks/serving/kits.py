"""SGLang's own shipped test kits against the real model: plain, C2T on chains and C2T on trees.

    python -m benchmarks.serving.kits
    python -m benchmarks.serving.kits --arms chains --only MatchedStopMixin.test_finish_length

`sglang.test.kits` are what SGLang tests its features with; no line of them is changed. What is not run, and which
figures of another model are replaced, is in `kits_inside.py`. A test that plain decoding fails too says nothing about
C2T and is listed with its reason. Outcomes are kept test by test; started again, a run skips those that are there.
Nothing else may run on the machine: the kits wait 10 to 60 s for an answer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cpu_engine import cpu_engine_env
from benchmarks.pairs.smollm2.commands import write_pair
from benchmarks.report.tables import table
from benchmarks.serving.arms import ARMS, Arm, Tree
from benchmarks.serving.engines import ENGINES, Device
from benchmarks.serving.host import cores
from benchmarks.serving.kits_inside import Outcomes, outcomes_in
from benchmarks.serving.real_demo import AS_IT_COMES, CONTESTANTS
from benchmarks.serving.real_pair import PATIENCE_S, WORK, real_speculation, use_threads
from benchmarks.serving.server import Runner
from c2t_plugin.errors import C2TError

SERVED: Mapping[str, Arm] = {
    "plain": ARMS["plain"],
    "chains": CONTESTANTS["sglang"][AS_IT_COMES],
    "trees": ARMS["C2T tree"],
}
BETA, SHAPE = 0.3, Tree(3, 4)
# The kits send prompts of 2,000 tokens, and up to 32 requests that want thousands. One asks for JSON that never ends: a
# longer context would be filled with it.
ROOM = ("--context-length", "4608", "--max-total-tokens", "40000", "--max-running-requests", "32")
PATIENCE = ("--watchdog-timeout", str(PATIENCE_S), "--enable-streaming-session")
# of all that is left of an arm
KITS_S = 7200


def run(server_of: Runner, name: str, pair: Path, out: Path, only: Sequence[str]) -> Outcomes:
    """By kit and test: what became of it, and why. C2TError if the server does not start, or there is no end."""
    on = replace(real_speculation(server_of.engine, pair, out, BETA, 0.3), tree=SHAPE)
    lines = out / f"{name}.jsonl"
    with server_of.server(name, SERVED[name], on) as server:
        assert server.process is not None
        inside = [sys.executable, "-m", "benchmarks.serving.kits_inside"]
        told = [server.base_url, str(server.process.pid), str(server_of.target), str(lines), *only]
        try:
            subprocess.run([*inside, *told], env=cpu_engine_env(os.environ), timeout=KITS_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise C2TError(f"the kits of {name} did not run to their end ({error}): start again to go on") from error
    return outcomes_in(lines)


def listed(found: Mapping[str, Outcomes]) -> str:
    """A line a kit: how many of its tests each arm passes; then each test that some arm does not, with the reason."""
    arms = list(found)
    kits = list(dict.fromkeys(kit for outcomes in found.values() for kit, _ in outcomes))

    def share(arm: str, kit: str) -> str:
        mine = [outcome for (of, _), (outcome, _) in found[arm].items() if of == kit]
        return f"{mine.count('passed')} of {len(mine)}"

    lines = [table(["kit", *arms], ([kit, *(share(arm, kit) for arm in arms)] for kit in kits))]
    for arm, outcomes in found.items():
        lines += [
            f"- {arm}: `{kit}.{test}` {outcome}: {reason}"
            for (kit, test), (outcome, reason) in outcomes.items()
            if outcome != "passed"
        ]
    return "\n".join(lines)


def worse(found: Mapping[str, Outcomes]) -> list[str]:
    """Tests that plain decoding passes and another arm does not."""
    plain = found.get("plain", {})
    return [
        f"{arm}: {kit}.{test}"
        for arm, outcomes in found.items()
        for (kit, test), (outcome, _) in outcomes.items()
        if outcome == "failed" and plain.get((kit, test), ("passed", ""))[0] == "passed"
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.kits", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=SERVED, default=list(SERVED))
    parser.add_argument("--only", nargs="+", default=[], metavar="KIT.TEST", help="these tests alone")
    parser.add_argument("--threads", type=int, default=cores(), help="of each server's arithmetic")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the pair, prepared if it is not there")
    parser.add_argument("--out", type=Path, default=Path("build/kits"), help="directory of outcomes and server logs")
    return parser


def main(argv: list[str]) -> int:
    """Print the table; status 1 if a test fails that plain decoding passes, 2 if a server does not start."""
    options = _parser().parse_args(argv)
    use_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        pair = write_pair(options.work)
        flags = ("--dtype", "float32", *ROOM, *PATIENCE)
        runner = Runner(ENGINES["sglang"], Device.CPU, pair / "target", options.out, flags)
        found = {name: run(runner, name, pair, options.out, options.only) for name in options.arms}
    except C2TError as error:
        print(f"kits: {error}", file=sys.stderr)
        return 2
    print(listed(found))
    for line in (wrong := worse(found)):
        print(f"plain decoding passes, this does not: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
