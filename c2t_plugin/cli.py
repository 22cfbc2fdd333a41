"""The `c2t` command: one table of subcommands, each imported only when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from c2t_plugin.errors import C2TError

# name -> (help, module); a module has main(argv: list[str]) -> int
COMMANDS = {
    "doctor": ("say what works here and what to do about what does not", "c2t_plugin.doctor"),
    "collect": ("record draft trees of a pair, with their acceptance", "c2t_plugin.lab.collect"),
    "fit": ("train a classifier from recorded trees", "c2t_plugin.lab.fit"),
    "calibrate": ("make a classifier's confidences probabilities", "c2t_plugin.lab.calibrate"),
    "tune": ("choose a classifier's beta from recorded trees", "c2t_plugin.lab.tune"),
    "evaluate": ("judge classifiers and their rivals on recorded trees", "c2t_plugin.lab.evaluate"),
    "plot": ("draw traces, evaluations and rows as pictures", "c2t_plugin.lab.plot"),
    "show": ("draw one recorded step and what each policy did", "c2t_plugin.lab.show"),
}
# top-level package that a subcommand needs -> extra that brings it
EXTRAS = {"tokenizers": "train", "transformers": "train", "rich": "train", "matplotlib": "plot", "sglang": "sglang"}
USAGE_ERROR = 2


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<12}{text}" for name, (text, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="c2t",
        description="C2T: a small classifier that cuts draft chains in speculative decoding.",
        epilog=f"commands:\n{listing}\n\n`c2t COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; an error that a user can act on is one line and status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _parser().parse_args(arguments[:1])
    module = COMMANDS[parsed.command][1]
    try:
        return int(import_module(module).main(arguments[1:]))
    # the system's too: names that are too long, folders that may not be searched, full disks
    except (C2TError, OSError) as error:
        print(f"c2t {parsed.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(f"c2t {parsed.command}: needs {missing}: pip install 'c2t-plugin[{EXTRAS[missing]}]'", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
