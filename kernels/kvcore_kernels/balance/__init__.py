"""The sum of two kinds of scores, each in units of its mean."""
