"""Development tools, not shipped: crash rounds, a soak, a fuzzer, hosts and servers."""
