"""What is cached: keys, identities and shapes that leader, workers and stores agree on."""
