"""Which experiments there are. A module of experiments has EXPERIMENTS: tuple[Experiment, ...]."""

from __future__ import annotations

from c2t_plugin.lab.reproduce.experiment import Registry

REGISTRY = Registry(
    (
        "c2t_plugin.lab.reproduce.c2t_v1_features",
        "c2t_plugin.lab.reproduce.c2t_v1_trees",
        "c2t_plugin.lab.reproduce.c2t_v1_chains",
        "c2t_plugin.lab.reproduce.c2t_v1_pictures",
        "c2t_plugin.lab.reproduce.c2t_v1_surface",
        "c2t_plugin.lab.reproduce.c2t_v1_training",
        "c2t_plugin.lab.reproduce.c2t_v1_corpora",
        "c2t_plugin.lab.reproduce.c2t_recent",
        "c2t_plugin.lab.reproduce.c2t_sharpened",
        "c2t_plugin.lab.reproduce.c2t_v2_tables",
        "c2t_plugin.lab.reproduce.c2t_v2_equations",
        "c2t_plugin.lab.reproduce.dyspec_overhead",
        "c2t_plugin.lab.reproduce.dyspec_acceptance",
        "c2t_plugin.lab.reproduce.dyspec_trees",
        "c2t_plugin.lab.reproduce.dyspec_blocks",
        "c2t_plugin.lab.reproduce.entropy_trees_entropy",
        "c2t_plugin.lab.reproduce.entropy_trees_shapes",
        "c2t_plugin.lab.reproduce.all_rules",
        "c2t_plugin.lab.reproduce.goals",
        "c2t_plugin.lab.reproduce.goals_fit",
        "c2t_plugin.lab.reproduce.goals_transfer",
    )
)
