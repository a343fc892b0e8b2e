"""Forward-pass features outside of layers: positions, token types, shared KV, expert routing."""
