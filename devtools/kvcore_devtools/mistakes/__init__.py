"""Mistakes that were found once, put back one by one: `make test` must find each of them."""
