"""One launch configuration of a kernel, written down so that it can be compiled ahead of time without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """A kernel with the types and constants of one kind of launch.

    kernel: the @triton.jit function.
    name: of this configuration, unique in its module, e.g. "stats_bf16_wide".
    signature: every argument in order -> Triton's word for its type ("*bf16", "*fp32", "*i32", "i32", "fp32"), or
        "constexpr". A pointer given as None at launch is a constexpr with the value None.
    constexprs: value of every constexpr argument.
    aligned: integer arguments that are multiples of 16 in such a launch. Triton compiles them, and 16-byte aligned
        pointers, apart; pointers of torch's own buffers are always so aligned and are taken as such.
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        arguments = list(self.kernel.arg_names)
        if list(self.signature) != arguments:
            raise ValueError(f"{self.name}: signature names {list(self.signature)}, the kernel takes {arguments}")
        constants = {argument for argument, kind in self.signature.items() if kind == "constexpr"}
        if constants != set(self.constexprs):
            raise ValueError(
                f"{self.name}: constexprs {sorted(self.constexprs)}, the signature has {sorted(constants)}"
            )
        strange = [a for a in self.aligned if self.signature.get(a) not in ("i32", "i64")]
        if strange:
            raise ValueError(f"{self.name}: aligned {strange} must be integer arguments of the kernel")

    @property
    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """What Triton's ASTSource takes as attrs: which arguments are divisible by 16, as far as the kernel cares."""
        cares = {each.name for each in self.kernel.params if not each.do_not_specialize_on_alignment}
        return {
            (place,): [["tt.divisibility", 16]]
            for place, (argument, kind) in enumerate(self.signature.items())
            if (kind.startswith("*") and argument in cares) or argument in self.aligned
        }


def signature_of(kernel: Any, constants: Mapping[str, Any], kinds: Mapping[str, str] | None = None) -> dict[str, str]:
    """A kernel's signature; what neither is a constant nor has a kind of its own is float32 or int32.

    kinds: Triton's words for those that are something else.
    """
    usual = {name: "*fp32" if name.startswith("p_") else "i32" for name in kernel.arg_names}
    return usual | dict(kinds or {}) | dict.fromkeys(constants, "constexpr")
