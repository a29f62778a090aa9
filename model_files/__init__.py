"""Readers of a model's files, without torch. Used by launcher, front, scheduler and detokenizer."""
