"""What the papers claim, and which rows here bear on it; the verdicts follow by benchmarks.papers.verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.claim import Claim
from benchmarks.papers.claims_c2t import C2T
from benchmarks.papers.claims_dyspec import DYSPEC
from benchmarks.papers.claims_entropy_trees import ENTROPY_TREES

CLAIMS: Sequence[Claim] = (*C2T, *DYSPEC, *ENTROPY_TREES)
