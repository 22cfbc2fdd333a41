"""Names of an engine that mean something of ours: for good, for one object's life, or for the length of a block.

Every adapter lists all of its own in one table, `patches.py`, each with its reason and its end. The table applies what
holds for good, once however often it is asked, and says in the log where somebody else has bound the same name. Imports
no engine.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from c2t_plugin.errors import ContractError

# The one attribute that an adapter sets on objects of its engine, whatever it has to say there.
ATTRIBUTE = "_c2t"

_ABSENT = object()
# Whose wrappers say nothing: what engines decorate their own functions with.
_DECORATORS = ("contextlib", "functools", "torch", "c2t_plugin")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Temporarily set `owner.name = value`; restore on exit, also after an error."""
    own = vars(owner)
    original = own.get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is _ABSENT:
            # inherited from a class, as a method of an object is
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def become(held: Any, ours: type) -> Any:
    """Have an engine's object be of our class, which is its own and more; its constructor has run. Returns it."""
    if not issubclass(ours, type(held)):
        raise ContractError(f"{ours.__name__} stands for {ours.__bases__[-1].__name__}, got {type(held).__name__}")
    held.__class__ = ours
    return held


@dataclass(frozen=True)
class Patch:
    """One name of the engine that C2T binds anew.

    target: "module:name" or "module:Owner.name", the engine's own; an owner may be a class or a dictionary.
    why: what C2T cannot do without. until: what of the engine would make it needless, or how long it lasts.
    when: at which of the table's occasions it is applied; empty: not by the table, but for a block (`Table.during`) or
    on single objects (`Table.on`). ours: "module:function", from the engine's value to ours; imported when it is bound,
    since what is bound may itself bind names of the table. hook: "after" or "around", where the engine itself has a
    registry for this; `ours` then is the hook.
    """

    target: str
    why: str
    until: str
    when: str = ""
    ours: str = ""
    hook: str = ""

    @property
    def name(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """What has the name: a module, class or dictionary. Imports the module."""
        return _owner(self.target)

    @property
    def dotted(self) -> str:
        return self.target.replace(":", ".")

    @property
    def handler(self) -> Callable[..., Any]:
        """What `ours` names. Imports the module."""
        handler: Callable[..., Any] = getattr(_owner(self.ours), self.ours.rpartition(":")[2])
        return handler


def _owner(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in path.split(".")[:-1]:
        found = getattr(found, part)
    return found


class Table:
    """All patches of one engine, and what of them this process has applied."""

    def __init__(
        self,
        package: str,
        logger: logging.Logger,
        patches: Sequence[Patch],
        hook: Callable[[Patch], None] | None = None,
    ) -> None:
        """package: the engine's. hook: how one is registered with the engine."""
        self.patches = tuple(patches)
        self._package, self._logger, self._hook = package, logger, hook
        # what the engine had, and ours
        self._applied: dict[Patch, tuple[Any, Any]] = {}
        self._told: set[tuple[Patch, str]] = set()
        self._noticed: set[Patch] = set()

    def apply(self, when: str) -> None:
        """Apply everything of this occasion that is not applied yet."""
        for patch in self.patches:
            if patch.when != when:
                continue
            if patch in self._applied:
                self._check(patch)
            elif patch.hook:
                assert self._hook is not None
                self._hook(patch)
                self._applied[patch] = (None, None)
            else:
                self._bind(patch)

    def check(self) -> None:
        """Say which of the applied ones somebody else has bound over ours since."""
        for patch in self._applied:
            self._check(patch)

    def require(self) -> None:
        """Raise ContractError unless every applied hook is in its place: an engine may log a failed one and go on."""
        for patch in self._applied:
            if not patch.hook:
                continue
            hooked = _hooks_of(_get(patch.owner, patch.name))
            if not any(module.startswith("c2t_plugin.") for module in hooked):
                raise ContractError(
                    f"{self._package} has not put C2T's hook over {patch.dotted} ({patch.why}): its log says why; take "
                    "out the plugin that stands in the way, or serve without C2T"
                )
            strange = (each for each in hooked if self._is_strange(patch, each))
            self._tell(patch, "%s, which C2T has hooked, was hooked by %s too", *strange)

    def during(self, patch: Patch, value: Any, owner: Any = None) -> contextlib.AbstractContextManager[None]:
        """Within it the name means `value`. owner: the object whose name it is, where that is no module or class."""
        owner = patch.owner if owner is None else owner
        if patch not in self._noticed:
            self._notice(patch, getattr(owner, patch.name, None))
        return replaced(owner, patch.name, value)

    def on(self, patch: Patch, owner: Any, ours: Callable[[Any], Any]) -> None:
        """Bind the name on one object, for its life: to what `ours` makes of the engine's."""
        stock = getattr(owner, patch.name)
        self._notice(patch, stock)
        setattr(owner, patch.name, ours(stock))

    def _bind(self, patch: Patch) -> None:
        stock = _get(patch.owner, patch.name)
        self._notice(patch, stock)
        # a class method is wrapped as the function that it is
        is_class_method = isinstance(stock, classmethod)
        ours = patch.handler(stock.__func__ if is_class_method else stock)
        ours = classmethod(ours) if is_class_method else ours
        _set(patch.owner, patch.name, ours)
        self._applied[patch] = (stock, ours)

    def _check(self, patch: Patch) -> None:
        if patch.hook:
            return
        found, ours = _get(patch.owner, patch.name), self._applied[patch][1]
        if found is not ours:
            self._tell(
                patch, "%s, which C2T has bound, was bound again by %s: C2T sees what that passes on", _where(found)
            )

    def _notice(self, patch: Patch, stock: Any) -> None:
        # once, since blocks come with every step
        self._noticed.add(patch)
        line = "%s was bound by %s before C2T binds it: C2T calls that in place of the engine's"
        # what the engine's registry has wrapped is bound by whoever hooked it
        registry = f"{self._package}.srt.plugins.hook_registry"
        strange = (each for each in layers(stock) if each == registry or self._is_strange(patch, each))
        self._tell(patch, line, *strange)

    def _tell(self, patch: Patch, line: str, *strangers: str) -> None:
        """Of the first of these modules, if there is one, and once."""
        if strangers and (patch, line) not in self._told:
            self._told.add((patch, line))
            self._logger.warning(f"C2T: {line}", patch.dotted, strangers[0])

    def _is_strange(self, patch: Patch, module: str) -> bool:
        # the name may be of a library that the engine calls
        own = patch.target.partition(".")[0]
        return module.partition(".")[0] not in (self._package, own, *_DECORATORS)


def layers(value: Any) -> list[str]:
    """Modules that a function and what it wraps were written in, the outermost first; those of a class: its own."""
    found = []
    while value is not None:
        value = getattr(value, "__func__", value)
        written_in = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None)
        if isinstance(written_in, str):
            found.append(written_in)
        value = getattr(value, "__wrapped__", None)
    return found


def _hooks_of(value: Any) -> list[str]:
    """Modules of the functions that its wrappers hold, as an engine's registry wraps hooks."""
    found = []
    value = getattr(value, "__func__", value)
    while value is not None:
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        found += [module for each in held if callable(each) for module in layers(each)[:1]]
        value = getattr(value, "__wrapped__", None)
    return found


def _where(value: Any) -> str:
    return next(iter(layers(value)), type(value).__name__)


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, MutableMapping):
        return owner[name]
    # a class method as it is written, not bound
    return vars(owner)[name] if name in vars(owner) else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        owner[name] = value
    else:
        setattr(owner, name, value)
