"""What only this repository uses: crash rounds, a soak, a fuzzer, hosts and servers."""
