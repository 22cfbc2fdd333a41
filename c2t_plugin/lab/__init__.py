"""Offline work: record the draft trees of a pair (`c2t collect`) and fit classifiers on them (`c2t fit`)."""
