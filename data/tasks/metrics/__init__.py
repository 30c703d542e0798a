"""Metrics of the published benchmarks, as their authors' own code scores an answer.

`infinitebench`, `leval`, `longbench` and `ruler` say which metric a task has; the other modules hold one kind of metric
each. All are pure functions of texts. They return a score from 0 to 1, larger is better, and keep the quirks of the
official code that moves a published figure; each quirk is named where it is.
"""
