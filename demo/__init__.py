"""The demo: real text through a real engine, with and without kvcore, in one command."""
