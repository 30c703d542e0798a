"""Metrics of the published benchmarks, as their authors' own code scores an answer: one kind in each module.

Which task has which is in the task's file. All are pure functions of texts. They return a score from 0 to 1, larger is
better, and keep the quirks of the official code that moves a published figure; each quirk is named where it is.
"""
