"""Checks a user can run: the reproducibility run and the small checkpoint it needs where no model is at hand."""
