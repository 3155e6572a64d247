"""Small changes of the code that decides, to find tests that cannot fail."""
