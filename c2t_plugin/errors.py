"""Errors that a user can act on. Each message names what came, what was expected and what to do."""


class C2TError(ValueError):
    """Something outside this package is not as it has to be: a file, a flag, an engine."""


class ConfigError(C2TError):
    """An option has a value that C2T cannot work with."""


class HubError(C2TError):
    """What is on the hub cannot be known: it was not reached, and its cache does not say."""


class ClassifierError(C2TError):
    """A classifier file is missing, damaged, or made for something else."""


class ContractError(C2TError):
    """An engine lacks a symbol that the adapter relies on, or has it in another shape."""
