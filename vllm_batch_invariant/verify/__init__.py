"""Checks that a user can run, their reports, and the small checkpoint that they need where no model is at hand."""
