"""Which experiments there are. A module of experiments has EXPERIMENTS: tuple[Experiment, ...]."""

from __future__ import annotations

from benchmarks.papers.experiment import Registry

REGISTRY = Registry(
    (
        "benchmarks.papers.c2t_v1_features",
        "benchmarks.papers.c2t_v1_trees",
        "benchmarks.papers.c2t_v1_chains",
        "benchmarks.papers.c2t_v1_pictures",
        "benchmarks.papers.c2t_v1_surface",
        "benchmarks.papers.c2t_v1_training",
        "benchmarks.papers.c2t_v1_corpora",
        "benchmarks.papers.c2t_recent",
        "benchmarks.papers.c2t_sharpened",
        "benchmarks.papers.c2t_v2_tables",
        "benchmarks.papers.c2t_v2_equations",
        "benchmarks.papers.dyspec_overhead",
        "benchmarks.papers.dyspec_acceptance",
        "benchmarks.papers.dyspec_trees",
        "benchmarks.papers.dyspec_blocks",
        "benchmarks.papers.entropy_trees_entropy",
        "benchmarks.papers.entropy_trees_shapes",
        "benchmarks.papers.all_rules",
        "benchmarks.papers.goals",
        "benchmarks.papers.goals_fit",
        "benchmarks.papers.goals_transfer",
    )
)
