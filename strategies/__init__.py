"""One strategy per file: a pure `place(workload, cluster, *, options) -> Placement`. Copy _template.py to begin."""
