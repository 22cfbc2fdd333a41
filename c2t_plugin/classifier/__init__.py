"""The classifier of C2T: features of a draft token to a confidence, and the file it lives in (C2T 4.1, B).

The table of features is c2t_kernels.network.features, as the kernels compute them too.
"""

from c2t_kernels.network import FEATURES, MIN_LOG_PROB, TABLE, NodeStats, PathSums, children, node_features
from c2t_plugin.classifier.file import (
    CALIBRATED_NAME,
    FILE_NAME,
    FORMAT,
    VERSION,
    load_classifier,
    save_classifier,
)
from c2t_plugin.classifier.network import NodeClassifier
from c2t_plugin.classifier.spec import EXTENDED_FEATURES, PAPER_FEATURES, PAPER_HIDDEN, PAPER_PARAMETERS, ClassifierSpec

__all__ = [
    "CALIBRATED_NAME",
    "EXTENDED_FEATURES",
    "FEATURES",
    "FILE_NAME",
    "FORMAT",
    "MIN_LOG_PROB",
    "PAPER_FEATURES",
    "PAPER_HIDDEN",
    "PAPER_PARAMETERS",
    "TABLE",
    "VERSION",
    "ClassifierSpec",
    "NodeClassifier",
    "NodeStats",
    "PathSums",
    "children",
    "load_classifier",
    "node_features",
    "save_classifier",
]
